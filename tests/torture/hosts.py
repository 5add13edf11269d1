"""A configuration of two hosts, as two processes on this machine's loopback: what happens to one, or to both."""

import contextlib
import fcntl
import gc
import os
import random
import select
import signal
import socket
import time

from tests.host_programs import share_programs
from tests.torture import faults
from tests.torture.history import LIMIT, History, read_metrics, run_in_fork, wait
from tests.torture.mesh import other_losses, two_devices

PATIENCE = 5.0  # seconds a host is given to end by itself once the other has; then the launcher ends it
DISAGREED = -1000  # exit code where the hosts ended in different ways


class TwoHosts(History):
    """A history whose every command is started twice, as a launcher on a cluster would."""

    def command(self, argv, prepare=lambda: None, kill_after=None) -> tuple[int, float]:
        codes, seconds = self.both(argv, [prepare] * 2, [kill_after] * 2)
        return _agreed(codes), seconds

    def both(self, argv: list[str], prepare: list, kill_after: list[float | None]) -> tuple[list[int], float]:
        """Both hosts, each with what is to happen to it: their exit codes, and the seconds since their training
        began."""
        self.tally.processes += 2
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        hosts = [
            self.host([*argv, "--hosts.coordinator", coordinator, "--hosts.count", "2", "--hosts.index", str(i)], make)
            for i, make in enumerate(prepare)
        ]
        with contextlib.ExitStack() as stack:
            begun, outputs = ([stack.enter_context(open(host[i], "rb")) for host in hosts] for i in (1, 2))
            select.select(begun, [], [], LIMIT)
            began = time.monotonic()
            codes = self.ends([host[0] for host in hosts], kill_after)
            self.said = "".join(output.read().decode(errors="replace") for output in outputs)
            return codes, time.monotonic() - began

    def host(self, argv: list[str], prepare) -> tuple[int, int, int]:
        """One host in a fork: its process, and what to read from it: that its training began, and what it says."""
        begun, begin = os.pipe()
        output, sink = os.pipe()
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, 1 << 20)
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            share_programs()
            run_in_fork(argv, sink, self.variant.poison, prepare, begin)
        os.close(begin)
        os.close(sink)
        return pid, begun, output

    def ends(self, pids: list[int], kill_after: list[float | None]) -> list[int]:
        """Exit codes, once every host has ended: killed at its time, or a while after the other has ended."""
        began, codes = time.monotonic(), [None, None]
        deadlines = [LIMIT if at is None else at for at in kill_after]
        while None in codes:
            for i, pid in enumerate(pids):
                if codes[i] is None and time.monotonic() - began > deadlines[i]:
                    os.kill(pid, signal.SIGKILL)
                    codes[i] = wait(pid, LIMIT) if deadlines[i] < LIMIT else 124
                elif codes[i] is None and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[i] = os.waitstatus_to_exitcode(found[1])
                if codes[i] is not None and codes[1 - i] is None:
                    deadlines[1 - i] = min(deadlines[1 - i], time.monotonic() - began + PATIENCE)
            time.sleep(0.005)
        return codes

    def check_reference(self) -> None:
        """Two hosts have the losses of one process with as many devices."""
        alone = self.folder / "alone"
        code, _ = super().command(self.argv(alone), two_devices)
        apart = f"exit code {code}" if code else other_losses(self, self.metrics, read_metrics(alone))
        if apart:
            self.tally.problems.append(f"{self.variant.name}: other losses than one process: {apart}")

    def start(self, kind: str, rng: random.Random) -> int:
        drawn = faults.KINDS[kind]
        place, hit = rng.choice(drawn.places), rng.randrange(2)
        if place == "failing save":
            hit = 0  # the first host finishes the saves of both
        struck = [drawn.both or i == hit for i in range(2)]
        later = [rng.uniform(0, 1.1 * self.seconds) if place == faults.ANY_TIME and it else None for it in struck]
        seeds = [rng.random() for _ in range(2)]

        def arm(i: int):
            return lambda: struck[i] and faults.arm(place, random.Random(seeds[i]), self.run)

        codes, _ = self.both(self.argv(self.run), [arm(0), arm(1)], later)
        if drawn.places == faults.KILLS and -signal.SIGKILL in codes:
            return 0 if codes[0] == 0 else -signal.SIGKILL  # the first may have finished when the second died
        return _agreed(codes)


def _agreed(codes: list[int]) -> int:
    return codes[0] if codes[0] == codes[1] else DISAGREED
