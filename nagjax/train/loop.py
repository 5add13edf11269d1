"""The training loop: steps, evaluations, metrics and checkpoints. A run that was stopped resumes automatically."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax

from nagjax.errors import UserError
from nagjax.files import check_storable, write_json
from nagjax.runs.config import RunConfig, to_dict
from nagjax.runs.facts import changed_surroundings, run_facts
from nagjax.runs.folder import prepare_folder
from nagjax.runs.lock import WriterLock
from nagjax.runs.metrics import TASKS
from nagjax.runs.names import CHECKPOINTS, INFO, STACKS
from nagjax.runs.opening import OpenRun
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.agreement import check_alike
from nagjax.train.announce import announce, check_memory
from nagjax.train.batches import Skipped
from nagjax.train.checkpoint.retention import SaveClock
from nagjax.train.checkpoint.store import Checkpoints, finished, steps_saved
from nagjax.train.distributed.consensus import from_first, together
from nagjax.train.evaluator import Evaluator, put, with_causal
from nagjax.train.host_votes import Ballot, VotingStep
from nagjax.train.logging.console import ProgressLine
from nagjax.train.logging.metrics import Writers, check_log
from nagjax.train.logging.steplog import BadStep, StepLog
from nagjax.train.loss import Batch
from nagjax.train.safety.stop import Interrupted, Stopper
from nagjax.train.safety.watchdog import Watchdog
from nagjax.train.setup import Setup, set_up
from nagjax.train.state import Blueprint, TrainState
from nagjax.train.step import jit_train_step
from nagjax.train.warm_start import begin, check_start

BROKEN_DOWN = ("loss", "grad_norm", "max_bad_steps")  # fields of the errors that mean that training broke down


def checked(config: RunConfig, folder: Path, fresh: bool = False, force: bool = False) -> tuple[Setup, list]:
    """The setup of a training and its validation batches, before anything is written. Raises UserError for whatever
    `train` refuses, including text that cannot be read, and whatever tracing the step raises, such as an error in a
    scheme's code: all of it must show before `fresh` deletes anything."""
    together(lambda: check_storable(folder))
    setup = together(lambda: set_up(config, None if fresh else folder))
    blueprint, config, options = setup.blueprint, setup.blueprint.config, setup.blueprint.config.train
    check_alike(config, setup.corpus)
    together(lambda: check_start(config, folder, fresh))
    if setup.tasks:
        asked = from_first(lambda: setup.tasks.digest)
        together(lambda: setup.tasks.check(asked))
    opened_only = from_first(lambda: not fresh and finished(folder / CHECKPOINTS, options.steps))
    if not opened_only:
        together(lambda: check_log(options.log))
    if not (from_first(lambda: force) or opened_only):
        together(lambda: check_memory(blueprint))
    if from_first(lambda: fresh and bool(steps_saved(folder / CHECKPOINTS))):
        together(lambda: jit_train_step(blueprint).eval_shape(blueprint.abstract(), abstract_batch(blueprint)))
    held_out = together(lambda: list(setup.evaluator.batches(options.eval_batches)))
    together(lambda: setup.evaluator.check(held_out))
    return setup, held_out


def train(
    config: RunConfig,
    folder: Path,
    *,
    fresh: bool = False,
    label: str = "",
    skip_damaged: bool = False,
    force: bool = False,
    callback: Callable[[dict[str, Any], OpenRun], None] | None = None,
) -> Path:
    """Trains the run in `folder`, or continues its training, and returns the folder.

    Writes config.json, info.json, metrics.jsonl and checkpoints/. A finished run is not changed. After SIGINT, SIGTERM
    or SIGHUP it saves and stops; the same signal again, two seconds later or more, ends it without saving. However a
    run stopped, the same call continues it, and the result equals, bit for bit, the parameters, optimizer state and
    metrics (`nagjax.runs.metrics.comparable`) of a run that never stopped. On NVIDIA GPUs, whose compiled steps are not
    deterministic, what is restored is exact, and later steps agree up to rounding.

    `fresh` deletes what a run has left in `folder` and begins anew. A model that does not fit into the devices' memory
    is an error unless `force` is set.

    `callback` is called with each record of metrics.jsonl after it was written, and with the run as it is then
    (`Loop.opened`); an exception in it ends the training as any other does.

    If the newest checkpoint is damaged, this is an error unless `skip_damaged` is set: then the damage is reported, the
    checkpoint is renamed, and an older one is used.

    In a run of several processes every process calls this; they share `folder`, and the first one writes the metrics.

    Raises UserError for bad input (naming field, value and fix), for a save that failed, and for bad steps according to
    `config.train.on_bad_step`; KeyboardInterrupt after SIGINT, Preempted (exit code 0) after SIGTERM and SIGHUP.
    """
    folder = Path(folder)
    if callback is not None and not callable(callback):
        raise UserError("callback", callback, "give a function of a record and the run, or leave it out")
    setup, held_out = checked(config, folder, fresh, force)
    blueprint, config, options = setup.blueprint, setup.blueprint.config, setup.blueprint.config.train
    policy = {"latest": options.keep, "best": options.keep_best, "every": options.keep_every}
    with (
        closing(setup.batches),
        WriterLock(folder, "train") as lock,
        Stopper() as stopper,
        closing(Watchdog(folder / STACKS)) as watchdog,
        ExitStack() as stack,
    ):
        owner = prepare_folder(config, folder, setup.corpus, fresh)
        lock.holds(owner["run"])
        checkpoints = stack.enter_context(Checkpoints(folder / CHECKPOINTS, owner, check=lock.check, **policy))
        resumed = checkpoints.newest(skip_damaged)
        owed = resumed is None or not checkpoints.facts(resumed).get("evaluated", True)
        if resumed is not None and resumed >= options.steps and not owed:
            return folder
        facts = run_facts(blueprint)
        changed = from_first(lambda: changed_surroundings(folder, facts))
        title, quiet = label or config.scheme.title, jax.process_index() > 0
        if not quiet:
            announce(blueprint, title.strip(), setup.corpus)
        skipped = Skipped(folder, fresh=resumed is None)
        begun = state_at(blueprint, folder, checkpoints, resumed)  # may raise; nothing is changed yet
        tokens = options.batch * config.model.context
        line = ProgressLine(title, options.steps, tokens, start=resumed or 0, quiet=quiet)
        logged = folder, options.log, to_dict(config), resumed or 0, owed

        def tell(record: dict[str, Any]) -> None:
            if callback is not None:
                log.pause()
                callback(record, loop.opened())

        check = lock.check if jax.process_count() == 1 else None  # several hosts learn it from their ballots
        with closing(together(lambda: Writers(*logged, tell, check))) as writers:
            log = StepLog(writers, line, tokens, facts, watchdog)
            loop = Loop(setup, held_out, skipped, checkpoints, writers, log, stopper, lock)
            loop.at(*begun)
            del begun  # frees the reference: a step reuses the state's memory
            if resumed is not None:
                writers.write("event", resumed, message=f"resumed under {changed}" if changed else "resumed")
            from_first(lambda: write_json(folder / INFO, facts))
            loop.go()
    return folder


def state_at(
    blueprint: Blueprint, folder: Path, checkpoints: Checkpoints, saved: int | None
) -> tuple[TrainState, int, bool]:
    """The state in the checkpoint of step `saved`, its step, and whether an evaluation is due there. If `saved` is
    None: the initial state of the run in `folder`."""
    if saved is None:
        return begin(blueprint, folder), 0, True
    owed = not checkpoints.facts(saved).get("evaluated", True)
    return checkpoints.restore(blueprint.abstract(), saved), saved, owed


class Loop:
    """A run that is training. Decides what happens after each step, and what to do about a bad one.

    `state` is the state after `done` steps; `owed` means that the evaluation due at this step has not been made yet.

    A step is saved and evaluated only after its own metrics were read, so every saved step was judged. If `on_bad_step`
    is "skip" it may be a bad one, which has not changed the parameters.
    """

    def __init__(
        self,
        setup: Setup,
        held_out: list[Batch],
        skipped: Skipped,
        checkpoints: Checkpoints,
        writers: Writers,
        log: StepLog,
        stopper: Stopper,
        lock: WriterLock,
    ):
        blueprint, evaluator = setup.blueprint, setup.evaluator
        self.blueprint, self.config = blueprint, blueprint.config.train
        self.batches, self.skipped, self.evaluator, self.checkpoints = setup.batches, skipped, evaluator, checkpoints
        self.tasks, self.tokenizer, self.held_out = setup.tasks, setup.corpus.tokenizer, held_out
        self.writers, self.log, self.stopper, self.lock = writers, log, stopper, lock
        routed = blueprint.config.model.mod.active
        self.causal = Evaluator(blueprint, evaluator.dataset, causal=True) if routed else None
        self.alone = jax.process_count() == 1
        self.take_step: Any = jit_train_step(blueprint) if self.alone else VotingStep(blueprint)
        self.clock = SaveClock(self.config)

    def go(self) -> None:
        """Trains from the current step to the end, or until it is asked to stop."""
        while True:
            score = None
            if self.owed:
                if self._judge(self.log.flush()):
                    continue
                score = self._evaluate()
            asked = self._asked()
            if asked.failed or asked.lost:
                jax.block_until_ready(self.state)  # hosts exchange errors next, and no step may be running then
                together(self.lock.check)  # before the save, which fails where the new owner has removed its folder
                self.checkpoints.wait()
            stop = self.done == self.config.steps or bool(asked.signal)
            if stop or self.clock.due(self.done, score, self.checkpoints.saved, bool(asked.overdue)):
                if self._judge(self.log.flush()):
                    continue
                self._save(score)
            if stop:
                break
            bad = self._step()
            self.stopper.settled = True  # everything is compiled, and there is something to save
            self._judge(bad)
        self.checkpoints.wait()
        complete = self.done == self.config.steps and not self.owed
        if not complete or self.stopper.signal:
            self.stopper.leave(self.done, complete)

    def at(self, state: TrainState, done: int, owed: bool) -> None:
        """Sets the state from which training continues."""
        self.state, self.done, self.owed = state, done, owed

    def opened(self) -> OpenRun:
        """The run as it is now, with the weights that evaluations use (`TrainState.weights`). Nothing is copied, so it
        is valid until the next step, which reuses their memory. Records of kind `train` are written a step late: in
        their callback this run is one step further than the record, except before evaluations and saves."""
        state = self.state
        return OpenRun(self.lock.folder, self.blueprint, self.done, state.weights, state.mod, self.tokenizer)

    def _ballot(self) -> Ballot:
        return Ballot(self.stopper.signal, self.clock.overdue(), self.checkpoints.failed, self.lock.lost)

    def _asked(self) -> Ballot:
        """What any host asks for: with one host its current requests, else those of the last step whose votes were
        read."""
        asked = self._ballot() if self.alone else self.take_step.known
        self.stopper.asked = self.stopper.asked or asked.signal
        return asked

    def _step(self) -> list[BadStep]:
        batch = put(self.blueprint, self.batches.take(self.skipped.batch_of(self.done + 1)))
        ballot = () if self.alone else (self._ballot(),)
        self.state, metrics = self.take_step(self.state, batch, *ballot)
        self.done += 1
        self.owed = self.done == self.config.steps or self.done % self.config.eval_every == 0
        return self.log.add(self.done, metrics)

    def _evaluate(self) -> float | None:
        """The validation loss (nats per token), by the causal decider if the model is routed. None if it was
        interrupted; the evaluation is then still owed."""
        self.log.pause()
        try:
            scores, depth = self._scores(self.evaluator)
            if self.causal is not None:
                scores, depth = with_causal((scores, depth), self._scores(self.causal))
            answers = self._answers()
        except Interrupted:
            return None
        tokens, loss = self.done * self.log.tokens_per_step, scores.get("causal_loss", scores["loss"])
        self.writers.write("eval", self.done, tokens=tokens, **scores)
        self.writers.write("depth", self.done, **depth)
        if answers:
            self.writers.write(TASKS, self.done, tokens=tokens, **answers)
        self.log.line.evaluated(self.done, loss, answers)
        self.log.restart_clock()
        self.owed = False
        return loss

    def _scores(self, evaluator: Evaluator) -> tuple[dict, dict]:
        state = self.state
        return evaluator(state.weights, state.mod, self.done, self.stopper.watch(self.held_out))

    def _answers(self) -> dict[str, float]:
        """The tasks' scores with the weights that are validated; empty at a step where tasks are not due."""
        due = self.done == self.config.steps or self.done % (self.config.tasks_every or 1) == 0
        if not (self.tasks and due):
            return {}
        return self.tasks.score(self.opened(), watch=self.stopper.watch)

    def _save(self, score: float | None) -> None:
        if self.done == 0:
            return
        self.log.pause()
        together(self.lock.check)
        self.writers.sync()  # metrics reach the disk before their checkpoint
        self.checkpoints.save(self.done, self.state, {"score": score, "evaluated": not self.owed})
        self.clock.restart()
        self.log.restart_clock()
        if not self.alone:
            self.take_step.saved()

    def _judge(self, bad: list[BadStep]) -> bool:
        """Handles bad steps as `on_bad_step` says. Returns whether the run was rolled back."""
        for step in bad:
            what = f"step {step.step} was bad, {step.field} = {step.value} ({step.reason})"
            if self.config.on_bad_step == "rollback":
                self._roll_back(step, what)
                return True
            self.writers.write("event", step.step, message=f"{what}: nothing was changed")
            if self.config.on_bad_step == "raise":
                fix = f"{step.reason} at step {step.step}: start a new run with a lower --lr, or see --on-bad-step"
                raise UserError(step.field, step.value, f"{fix}; the last checkpoint is kept")
            if step.in_a_row > self.config.max_bad_steps:
                self._give_up(f"{step.in_a_row} bad steps in a row; last: {what}")
        return False

    def _roll_back(self, bad: BadStep, what: str) -> None:
        """Returns to the newest checkpoint, or to the initial state; the bad step's batch is left out from now on."""
        jax.block_until_ready(self.state)
        self.checkpoints.wait()
        target = self.checkpoints.newest()
        batch = self.skipped.batch_of(bad.step)
        self.skipped.add(batch)
        self.log.forget()
        del self.state  # freed before another state is read: memory may not hold two
        self.at(*state_at(self.blueprint, self.lock.folder, self.checkpoints, target))
        self.writers.rewind(self.done, self.owed)
        message = f"{what}: back to step {self.done}, and batch {batch} is left out"
        self.writers.write("event", self.done, message=message)
        if self.skipped.after(self.done) > self.config.max_bad_steps:
            self._give_up(f"{self.skipped.after(self.done)} rollbacks to step {self.done}; last: {what}")
        self.log.restart_clock()

    def _give_up(self, what: str) -> None:
        fix = f"{what}: start a new run with a lower --lr; the last checkpoint is kept"
        raise UserError("max_bad_steps", self.config.max_bad_steps, fix)
