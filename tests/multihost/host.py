"""Hosts, each a process, through several runs. `python host.py` imports what they need once; for every line on its
standard input, a JSON list of jobs' paths, it forks a host for each job and prints the exit codes of all as JSON (minus
the signal for one that was ended so). A job is a pickled dict of `hosts`, `log`, `printed`, `schemes` and `runs`.

Of each scheme (with its initial values) a few steps are taken on all devices of both hosts, and their losses noted.

Each run has `config`, `out` and what is done to it on this host: `nan` or `nonsense` (number of a batch made NaN, or of
targets that never occur), `at` and `signal` (sent to itself: after that many steps, or evaluated batches in all, or as
the save of that step begins, as `during` has it), `failing` (its manifests fail), `overdue` (steps at which its clock
says so). If it has `asked`, a text, a callback continues it after each evaluation. What came of it is appended to `log`
as JSON lines.
"""

import faulthandler
import json
import os
import pickle
import sys

SILENCE = 10  # seconds: here the hosts are neighbours


def connect(job: dict) -> None:
    from nagjax.train.distributed import hosts
    from tests.host_programs import share_programs

    share_programs()
    hosts.HEARTBEAT, hosts.FAREWELL = SILENCE, SILENCE
    hosts.connect(job["hosts"])


def losses(scheme, start, steps: int = 3) -> list[tuple[float, float]]:
    """Loss and gradient norm of a few steps; this host holds half of each batch."""
    import jax
    import numpy as np

    from nagjax.runs.config import MeshConfig
    from nagjax.train.distributed.mesh import batch_share, make_mesh
    from nagjax.train.evaluator import put
    from nagjax.train.host_votes import Ballot, VotingStep
    from nagjax.train.state import Blueprint
    from tests import tiny

    blueprint = Blueprint.of(tiny.run_config(scheme), make_mesh(MeshConfig(data=2, fsdp=4)))
    place = lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])  # noqa: E731
    state, step, seen = jax.tree.map(place, start, blueprint.shardings()), VotingStep(blueprint), []
    share, count = batch_share(blueprint.mesh).values()
    for seed in range(steps):
        rows = {name: np.split(value, count)[share] for name, value in tiny.packed_batch(seed)._asdict().items()}
        state, metrics = step(state, put(blueprint, rows), Ballot())
        seen.append((float(metrics.loss), float(metrics.grad_norm)))
    return seen


def main(job: dict) -> None:
    import jax
    import numpy as np

    import nagjax
    from nagjax.errors import Preempted, UserError
    from nagjax.runs import folder as run_folder
    from nagjax.train import evaluator
    from nagjax.train import loop as loop_module
    from nagjax.train.batches import TrainBatches
    from nagjax.train.checkpoint import store as checkpoint
    from nagjax.train.checkpoint.retention import SaveClock
    from nagjax.train.host_votes import Ballot
    from nagjax.train.loop import Loop, train
    from nagjax.train.safety.stop import Stopper
    from nagjax.train.state import Blueprint

    log = open(job["log"], "a", buffering=1)
    for scheme, start in job["schemes"]:
        log.write(json.dumps({"scheme": scheme.name, "seen": losses(scheme, start)}) + "\n")

    voting_step, eval_step, made = loop_module.VotingStep, evaluator.jit_eval_step, {}

    def stepper(blueprint):
        step = made.setdefault("step", None) or voting_step(blueprint)
        step.known, step._sent, made["step"] = Ballot(), None, step
        return step

    def evaluating(blueprint, **options):
        rule = tuple(options.items())  # top-k, or the causal decider
        if rule not in made:
            made[rule] = eval_step(blueprint, **options)
        return made[rule]

    def creating(self):
        if "create" not in made:
            seed = self.config.train.seed
            made["create"] = jax.jit(lambda: self.init(seed), out_shardings=self.shardings())
        return made["create"]()

    # The runs differ in nothing that is compiled, and compiling is what costs.
    loop_module.VotingStep, evaluator.jit_eval_step, Blueprint.create = stepper, evaluating, creating
    take, step, judge, write, watch = (
        TrainBatches.take,
        Loop._step,
        Loop._judge,
        checkpoint.write_manifest,
        Stopper.watch,
    )
    save, evaluated = checkpoint.Checkpoints.save, []

    def note(**what):
        log.write(json.dumps({"out": run["out"]} | what) + "\n")

    def reached(during, number):
        if run.get("during", "step") == during and number == run.get("at"):
            os.kill(os.getpid(), run["signal"])

    def taking(self, number):
        batch = take(self, number)
        note(batch=number, tokens=batch["tokens"].tolist())
        if number == run.get("nan"):
            batch = batch | {"weights": np.full_like(batch["weights"], np.nan)}
        if number == run.get("nonsense"):
            batch = batch | {"targets": np.full_like(batch["targets"], 255)}
        return batch

    def stepping(self):
        bad = step(self)
        self.clock.step = self.done
        reached("step", self.done)
        return bad

    def judging(self, bad):
        if bad:
            note(bad=[b.step for b in bad], reason=bad[0].reason)
        return judge(self, bad)

    def writing(*given):
        if run.get("failing"):
            raise OSError(5, "Input/output error")
        write(*given)

    def saving(self, number, *given):
        save(self, number, *given)
        reached("save", number)

    def watching(self, batches):
        for batch in watch(self, batches):
            evaluated.append(1)
            reached("evaluation", len(evaluated))
            yield batch

    TrainBatches.take, Loop._step, Loop._judge, checkpoint.write_manifest = taking, stepping, judging, writing
    checkpoint.Checkpoints.save, Stopper.watch = saving, watching
    run_folder.SEEN = 1.0  # seconds
    SaveClock.overdue = lambda self: getattr(self, "step", 0) in run.get("overdue", ())

    def asking(record, opened):
        if record["kind"] == "eval" and "asked" in run:
            written = nagjax.complete(opened, [run["asked"], ""], tokens=4, temperature=0)
            note(written=written, logits=np.asarray(opened.logits(run["asked"])).tolist())

    for run in job["runs"]:
        evaluated.clear()
        try:
            train(run["config"], run["out"], callback=asking)
            note(end="finished")
        except Preempted as stopped:
            note(end="preempted", code=stopped.code or 0)
        except UserError as error:
            note(end="refused", message=str(error))


def serve() -> str | None:
    """Returns in every fork its job's path, and nothing at the end of the lines."""
    for line in sys.stdin:
        hosts = []
        for path in json.loads(line):
            host = os.fork()
            if not host:
                return path
            hosts.append(host)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(host, 0)[1]) for host in hosts]), flush=True)
    return None


if __name__ == "__main__":
    import grain  # noqa: F401

    import nagjax.train.loop  # noqa: F401
    import tests.tiny  # noqa: F401

    if path := serve():
        with open(path, "rb") as file:
            job = pickle.load(file)
        with open(job["printed"], "w") as printed:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(printed.fileno(), stream.fileno())
        faulthandler.dump_traceback_later(float(os.environ["HOST_LIMIT"]), exit=True)  # whatever happens, it ends
        connect(job)
        main(job)
