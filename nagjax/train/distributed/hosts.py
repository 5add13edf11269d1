"""Connects the hosts of a run with `jax.distributed`, from options or from the environment."""

import dataclasses
import importlib.util
import math
import os
import re
import socket
import sys
import time
from collections.abc import Mapping

import jax

from nagjax.errors import UserError
from nagjax.processes import alarm
from nagjax.train.distributed.hosts_config import HostsConfig

HEARTBEAT = 60  # seconds without a sign of life from a host, after which the others end
LEAST = 1.0  # seconds, enough for hosts that are all up to find each other
SPARE = 60  # seconds that jax waits for the others beyond this process's own deadline, so that this process ends first
FAREWELL = 20  # seconds that a host waits at its end for the others to end


@dataclasses.dataclass(frozen=True)
class Place:
    """The arguments of `jax.distributed.initialize` for this process: either all three fields, or none where jax
    detects them."""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None


def find(config: HostsConfig, environment: Mapping[str, str], cloud_tpu: bool) -> Place | None:
    """Finds this process's `Place`; None for a run of one process.

    Sources, in this order: the options, or COORDINATOR_ADDRESS, NUM_PROCESSES and PROCESS_ID (JOB_COMPLETION_INDEX in a
    Kubernetes indexed job); SLURM, with one process per task; Cloud TPU, on Compute Engine or GKE, with one slice or
    several, which jax detects. Raises UserError naming the option or variable that is wrong or missing.
    """
    coordinator = _given(config.coordinator, "hosts.coordinator", environment, "COORDINATOR_ADDRESS")
    count = _given(config.count, "hosts.count", environment, "NUM_PROCESSES")
    index = _given(config.index, "hosts.index", environment, "PROCESS_ID")
    if count is not None and count.value == 1:
        return None
    if index is None and (coordinator or count):
        index = _given(None, "", environment, "JOB_COMPLETION_INDEX")
    if coordinator or count or index:
        return _spelled_out(coordinator, count, index)
    tasks = _given(None, "", environment, "SLURM_NTASKS") if "SLURM_JOB_ID" in environment else None
    if tasks and int(tasks.value) > 1:
        if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
            fix = "start the command with srun, once per task; or give --hosts.count 1 for a run of one process"
            raise UserError("SLURM_NTASKS", environment["SLURM_NTASKS"], fix)
        return Place()
    return Place() if cloud_tpu else None


@dataclasses.dataclass(frozen=True)
class _Given:
    """A value, and the name of the option or variable that gave it."""

    name: str
    value: str | int


def _given(option: str | int | None, name: str, environment: Mapping[str, str], variable: str) -> _Given | None:
    if option is not None:
        return _Given(name, option)
    text = environment.get(variable)
    if not text:
        return None
    if variable == "COORDINATOR_ADDRESS":
        return _Given(variable, text)
    if not text.isdecimal():
        raise UserError(variable, text, "give a whole number, or unset it")
    return _Given(variable, int(text))


def _spelled_out(coordinator: _Given | None, count: _Given | None, index: _Given | None) -> Place:
    wanted = {
        "COORDINATOR_ADDRESS": (coordinator, "--hosts.coordinator ADDRESS:PORT of process 0"),
        "NUM_PROCESSES": (count, "--hosts.count, the number of processes"),
        "PROCESS_ID": (index, "--hosts.index, this process's number from 0"),
    }
    for variable, (found, option) in wanted.items():
        if found is None:
            there = ", ".join(f"{given.name} = {given.value!r}" for given, _ in wanted.values() if given)
            raise UserError(variable, None, f"is missing, but {there} is given: set it, or give {option}")
    assert coordinator and count and index
    processes, number = int(count.value), int(index.value)
    host, _, port = str(coordinator.value).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(coordinator.name, coordinator.value, "give ADDRESS:PORT, such as 10.0.0.2:8476")
    if processes < 1:
        raise UserError(count.name, count.value, "give a number of processes of at least 1")
    if not 0 <= number < processes:
        fix = f"give a number from 0 to {processes - 1}: {count.name} is {processes}"
        raise UserError(index.name, index.value, fix)
    return Place(str(coordinator.value), processes, number)


def connect(config: HostsConfig) -> None:
    """Connects to the other hosts, if there are any. Must be called before jax looks for devices.

    If a host dies, the others end too, within `HEARTBEAT` seconds, so that the launcher can restart all of them. Raises
    UserError if the environment is incomplete, or if process 0, whose address was given, cannot be reached within
    `timeout` seconds. Ends the process with exit code 2 if another process does not connect in this time.
    """
    place = find(config, os.environ, _on_cloud_tpu())
    if place is None:
        return
    deadline = time.monotonic() + config.timeout
    if place.index and place.coordinator:
        _wait_for_first(place.coordinator, config, deadline)
    left = max(deadline - time.monotonic(), LEAST)
    try:
        with alarm(left, _end, config, place):
            jax.distributed.initialize(
                place.coordinator,
                place.count,
                place.index,
                initialization_timeout=math.ceil(left) + SPARE,
                heartbeat_timeout_seconds=HEARTBEAT,
                shutdown_timeout_seconds=FAREWELL,
            )
    except (RuntimeError, ValueError) as error:
        raise _not_found(place.coordinator, config, error) from error
    if _alone_on_its_node(os.environ) and not os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        for visible in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(visible, "all")  # jax saw only GPU 0, the task's number on its node


def _alone_on_its_node(environment: Mapping[str, str]) -> bool:
    """Whether SLURM has started one process on every node."""
    return {*re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))} == {"1"}


def _end(config: HostsConfig, place: Place) -> None:
    """Ends the process with a one-line message. XLA would not raise an error but abort the process with a stack
    trace."""
    every = "all" if place.count is None else f"all {place.count}"
    port = f"open {place.coordinator} to all" if place.coordinator else "open their ports"
    fix = (
        f"not {every} hosts have come in this time: start every one, with the same number of hosts, and {port}; "
        "or give them more seconds"
    )
    print(f"nagjax: error: {UserError('hosts.timeout', config.timeout, fix)}", file=sys.stderr, flush=True)
    os._exit(2)


def _wait_for_first(coordinator: str, config: HostsConfig, deadline: float) -> None:
    """Waits until process 0 listens, at most until `deadline` (seconds of `time.monotonic`). Without this wait jax
    would end the process with a stack trace."""
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # an IPv6 address stands in brackets
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _not_found(coordinator, config, error) from error
        time.sleep(0.2)


def _not_found(coordinator: str | None, config: HostsConfig, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [""])[0]
    name = "hosts.coordinator" if config.coordinator else "COORDINATOR_ADDRESS"
    fix = f"the hosts did not find each other ({reason}): start every host, and open the port to all of them"
    return UserError(name, coordinator, fix)


def _on_cloud_tpu() -> bool:
    """Whether this is a Cloud TPU. Importing jax sets TPU_SKIP_MDS_QUERY if there is no TPU chip. GKE sets it in every
    pod, and where a slice has several hosts GKE sets their addresses beside it."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if wanted and "tpu" not in wanted.split(","):
        return False
    if importlib.util.find_spec("libtpu") is None:
        return False
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    gke = "," in hosts or bool({"TPU_PROCESS_ADDRESSES_PATH", "MEGASCALE_NUM_SLICES"} & os.environ.keys())
    return gke or "TPU_SKIP_MDS_QUERY" not in os.environ
