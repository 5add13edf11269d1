"""One host, as a process, through several runs: `python host.py JOB`, a pickled dict of `hosts`, `log` and `runs`.

Each run has `config`, `out` and what is done to it on this host: `nan` (number of a batch made NaN), `at` and `signal`
(sent to itself after that step), `failing` (its seals fail), `overdue` (steps at which its clock says so). What came of
it is appended to `log` as JSON lines.
"""

import faulthandler
import json
import os
import pickle
import sys


def main(job: dict) -> None:
    import jax
    import numpy as np

    jax.config.update("jax_disable_most_optimizations", True)
    from nagjax.errors import Preempted, UserError
    from nagjax.train import checkpoint, evaluator
    from nagjax.train import run as run_module
    from nagjax.train.hosts import connect
    from nagjax.train.loop import train
    from nagjax.train.run import Run
    from nagjax.train.saves import SaveClock
    from nagjax.train.state import Blueprint
    from nagjax.train.stream import TrainStream
    from nagjax.train.voting import Ballot

    connect(job["hosts"])
    voting_step, eval_step, made = run_module.VotingStep, evaluator.jit_eval_step, {}

    def stepper(blueprint):
        step = made.setdefault("step", None) or voting_step(blueprint)
        step.known, step._sent, made["step"] = Ballot(), None, step
        return step

    def evaluating(blueprint, **options):
        made["eval"] = made.get("eval") or eval_step(blueprint, **options)
        return made["eval"]

    def creating(self):
        if "create" not in made:
            seed = self.config.train.seed
            made["create"] = jax.jit(lambda: self.init(seed), out_shardings=self.shardings())
        return made["create"]()

    # The runs differ in nothing that is compiled, and compiling is what costs.
    run_module.VotingStep, evaluator.jit_eval_step, Blueprint.create = stepper, evaluating, creating
    take, step, judge, seal = TrainStream.take, Run._step, Run._judge, checkpoint.seal
    log = open(job["log"], "a", buffering=1)

    def note(**what):
        log.write(json.dumps({"out": run["out"]} | what) + "\n")

    def taking(self, number):
        batch = take(self, number)
        note(batch=number, tokens=batch["tokens"].tolist())
        if number == run.get("nan"):
            batch = batch | {"weights": np.full_like(batch["weights"], np.nan)}
        return batch

    def stepping(self):
        bad = step(self)
        self.clock.step = self.done
        if self.done == run.get("at"):
            os.kill(os.getpid(), run["signal"])
        return bad

    def judging(self, bad):
        if bad:
            note(bad=[b.step for b in bad])
        return judge(self, bad)

    def sealing(*given):
        if run.get("failing"):
            raise OSError(5, "Input/output error")
        seal(*given)

    TrainStream.take, Run._step, Run._judge, checkpoint.seal = taking, stepping, judging, sealing
    SaveClock.overdue = lambda self: getattr(self, "step", 0) in run.get("overdue", ())
    for run in job["runs"]:
        try:
            train(run["config"], run["out"])
            note(end="finished")
        except Preempted as stopped:
            note(end="preempted", code=stopped.code or 0)
        except UserError as error:
            note(end="refused", message=str(error))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(os.environ["HOST_LIMIT"]), exit=True)  # whatever happens, it ends
    with open(sys.argv[1], "rb") as file:
        main(pickle.load(file))
