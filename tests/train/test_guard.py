"""Bad steps are detected on the device and change nothing; and what a run does about them under each policy."""

import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.mod.config import ModConfig
from nagjax.residual import find_scheme
from nagjax.runs.metrics import comparable
from nagjax.train import loop as loop_module
from nagjax.train.batches import TrainBatches
from nagjax.train.checkpoint.store import steps_saved
from nagjax.train.distributed.mesh import batch_sharding
from nagjax.train.loop import train
from nagjax.train.safety.guard import WINDOW, Guard, guarded, is_good, new_guard, remember, spike_limit
from nagjax.train.step import jit_train_step
from tests import tiny
from tests.tolerance import assert_close

NAN, INF = np.float32(np.nan), np.float32(np.inf)


def full(losses) -> Guard:
    return Guard(jnp.asarray(losses, jnp.float32), jnp.int32(len(losses)), jnp.int32(0))


@pytest.mark.parametrize(
    ("loss", "norm", "good"),
    [(1.0, 1.0, True), (NAN, 1.0, False), (INF, 1.0, False), (1.0, NAN, False), (1.0, INF, False), (-INF, 1.0, False)],
)
def test_what_is_not_finite_is_bad(loss, norm, good):
    assert bool(is_good(new_guard(), jnp.float32(loss), jnp.float32(norm), 0.0)) is good


def test_the_rule_for_spikes():
    losses = 3.0 + 0.1 * np.random.default_rng(0).standard_normal(WINDOW)
    middle = np.median(losses)
    limit = middle + 6.0 * 1.4826 * np.median(np.abs(losses - middle))
    assert_close(spike_limit(jnp.float32(losses), 6.0), limit, terms=1, chain=4)
    judge = lambda guard, loss: bool(is_good(guard, jnp.float32(loss), jnp.float32(1.0), 6.0))  # noqa: E731
    assert judge(full(losses), limit - 0.01) and not judge(full(losses), limit + 0.01)
    assert judge(full(losses), 0.0)  # a fall is welcome
    assert judge(full([*losses[1:], NAN]), 100.0) and judge(new_guard(), 100.0)  # too little is known
    flat = full(np.full(WINDOW, 2.0))
    assert judge(flat, 2.0 * 1.05) and not judge(flat, 2.0 * 1.07)  # at least 1% of the median counts as deviation


def test_a_bad_step_enters_no_average():
    guard = full(np.arange(WINDOW))
    after = remember(guard, jnp.bool_(False), jnp.float32(NAN))
    np.testing.assert_array_equal(after.losses, guard.losses)
    assert (int(after.good), int(after.bad)) == (WINDOW, 1) and int(remember(after, jnp.bool_(False), NAN).bad) == 2
    again = remember(after, jnp.bool_(True), jnp.float32(7.5))
    np.testing.assert_array_equal(again.losses, [*range(1, WINDOW), 7.5])
    assert (int(again.good), int(again.bad)) == (WINDOW + 1, 0)


def poisoned(batch):
    return batch._replace(weights=batch.weights * NAN)


@pytest.fixture(scope="module")
def routed():
    """A routed model on two devices after two steps, so that moments and averages are not at their start."""
    config = tiny.run_config(find_scheme("nag")(), mod=ModConfig(rate=(0.5,)))
    blueprint = tiny.blueprint(config, data=2)
    step, state = jit_train_step(blueprint), blueprint.create()
    for seed in range(2):
        state, _ = step(state, jax.device_put(tiny.packed_batch(seed), batch_sharding(blueprint.mesh)))
    return blueprint, step, jax.device_get(state)


def test_a_skipped_step_leaves_everything_as_it_was_bit_for_bit(routed):
    blueprint, step, before = routed
    place = lambda tree: jax.device_put(tree, blueprint.shardings())  # noqa: E731
    batch = lambda b: jax.device_put(b, batch_sharding(blueprint.mesh))  # noqa: E731
    after, metrics = step(place(before), batch(poisoned(tiny.packed_batch(5))))
    after = jax.device_get(after)
    assert not np.isfinite(metrics.loss) and int(metrics.bad) == 1
    assert int(after.step) == 3 and int(after.guard.good) == 2 and int(after.guard.bad) == 1
    same = after._replace(step=before.step, guard=before.guard)
    jax.tree.map(np.testing.assert_array_equal, same, before)
    np.testing.assert_array_equal(after.guard.losses, before.guard.losses)
    assert after.mod["cuts"].any()

    # and the next good step is the one that would have been taken, but for what depends on the step's number
    _, metrics = step(place(after), batch(tiny.packed_batch(7)))
    assert np.isfinite(metrics.loss) and int(metrics.bad) == 0 and step._cache_size() == 1


def test_a_batch_without_a_counted_target_changes_only_the_step_count(routed):
    """Neither moments, decay, averages nor the window of losses, in which its 0 nats would make others spikes."""
    blueprint, step, before = routed
    place = lambda tree: jax.device_put(tree, blueprint.shardings())  # noqa: E731
    batch = tiny.packed_batch(5)
    batch = jax.device_put(batch._replace(weights=batch.weights * 0), batch_sharding(blueprint.mesh))
    after, metrics = step(place(before), batch)
    assert int(after.step) == 3 and int(metrics.bad) == 0
    assert float(metrics.count) == 0 and np.isnan(metrics.loss) and np.isnan(metrics.accuracy)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after)._replace(step=before.step), before)
    bad = before._replace(guard=before.guard._replace(bad=jnp.int32(2)))
    after, metrics = step(place(bad), batch)  # after bad ones it is not one of them, and does not end their row
    assert int(metrics.bad) == 0 and int(after.guard.bad) == 2


def test_a_gradient_alone_is_enough(routed):
    _, _, before = routed
    new = before._replace(step=before.step + 1, params=jax.tree.map(lambda x: x + NAN, before.params))
    after = guarded(before, new, jnp.float32(1.0), jnp.float32(INF), jnp.float32(9.0), 0.0)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert int(after.guard.bad) == 1
    one = jnp.float32(1.0)
    after = guarded(before, new._replace(params=before.params), one, one, one, 0.0)
    assert int(after.guard.bad) == 0 and int(after.guard.good) == 3


# ---- runs


def poison(monkeypatch, numbers, key="weights"):
    """From now on these batches are bad whenever they are used; returns a list of the numbers used so far."""
    take, taken = TrainBatches.take, []

    def bad(self, number):
        taken.append(number)
        batch = dict(take(self, number))
        if number in numbers:
            batch["weights"] = batch["weights"] * NAN
        return batch

    monkeypatch.setattr(TrainBatches, "take", bad)
    return taken


@pytest.fixture(scope="module")
def sound(run_of, tmp_path_factory):
    return train(run_of(eval_every=100), tmp_path_factory.mktemp("runs") / "sound")


def read(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_raise_keeps_the_last_checkpoint_and_says_what_to_do(run_of, sound, tmp_path, monkeypatch):
    poison(monkeypatch, {2})
    with pytest.raises(
        UserError, match="not finite at step 3.*lower --lr.*--on-bad-step.*checkpoint is kept"
    ) as caught:
        train(run_of(eval_every=100), tmp_path / "run")
    assert caught.value.field == "loss" and steps_saved(tmp_path / "run" / "checkpoints") == [2]
    monkeypatch.undo()
    train(run_of(eval_every=100), tmp_path / "run")
    assert comparable(tmp_path / "run" / "metrics.jsonl") == comparable(sound / "metrics.jsonl")
    assert [e["step"] for e in read(tmp_path / "run", "event")] == [3, 2]


def test_skip_goes_on_and_logs_it(run_of, tmp_path, monkeypatch):
    poison(monkeypatch, {1, 2})
    train(run_of(on_bad_step="skip"), tmp_path / "run")
    lines = read(tmp_path / "run", "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] is None for line in lines] == [False, True, True, False, False, False]
    assert [line["step"] for line in lines if line.get("skipped")] == [2, 3]
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert ["nothing was changed" in e["message"] for e in read(tmp_path / "run", "event")] == [True, True]
    with pytest.raises(UserError, match="2 bad steps in a row.*lower --lr") as caught:
        train(run_of(on_bad_step="skip", max_bad_steps=1), tmp_path / "other")
    assert caught.value.field == "max_bad_steps"


def test_rollback_returns_to_the_checkpoint_and_leaves_the_batch_out(run_of, sound, tmp_path, monkeypatch):
    """With the batches 2 and 4 bad, the run equals one whose stream never had them. And it lets go of the bad state
    before it reads another."""
    take, order = TrainBatches.take, [0, 1, 2, 2, 3, 3, 4, 5]  # with a bad one before the third and before the fourth
    monkeypatch.setattr(TrainBatches, "take", lambda self, number: take(self, order[number]))
    taken = poison(monkeypatch, {2, 4})
    read_state, alive = loop_module.state_at, []

    def watched(blueprint, *others):
        shapes = [leaf.shape for leaf in jax.tree.leaves(blueprint.abstract().optimizer) if leaf.ndim > 1]
        alive.append(sum(array.shape in shapes for array in jax.live_arrays()))
        return read_state(blueprint, *others)

    monkeypatch.setattr(loop_module, "state_at", watched)
    gc.collect()
    folder = train(run_of(eval_every=100, on_bad_step="rollback"), tmp_path / "run")
    # step 3 takes batch 2, and batch 3 is under way when that is known; back to step 2; then the same with batch 4
    assert taken == [0, 1, 2, 3, 3, 4, 3, 5, 6, 7]
    assert json.loads((folder / "skipped.json").read_text()) == {"batches": [2, 4]}
    messages = [(e["step"], e["message"]) for e in read(folder, "event")]
    assert [step for step, _ in messages] == [2, 2] and "back to step 2, and batch 4 is left out" in messages[1][1]
    assert comparable(folder / "metrics.jsonl") == comparable(sound / "metrics.jsonl")
    assert len(alive) == 3 and max(alive) <= alive[0], "as many as before the run had a state"


def test_rollback_to_the_start_and_too_many(run_of, tmp_path, monkeypatch):
    taken = poison(monkeypatch, {0, *range(4, 100)})
    with pytest.raises(UserError, match="3 rollbacks to step 2") as caught:
        train(run_of(on_bad_step="rollback", max_bad_steps=2), tmp_path / "run")
    assert caught.value.field == "max_bad_steps"
    assert taken[:6] == [0, 1, 1, 2, 3, 4] and steps_saved(tmp_path / "run" / "checkpoints") == [2]
    kinds = [(r["kind"], r["step"]) for r in comparable(tmp_path / "run" / "metrics.jsonl")]
    assert kinds == [("eval", 0), ("depth", 0), ("train", 1), ("train", 2)]


def test_a_spike_is_skipped_and_one_like_it_before_the_window_is_full_is_not(run_of, tmp_path, monkeypatch):
    take = TrainBatches.take

    def nonsense(self, number):
        batch = dict(take(self, number))
        if number in (10, WINDOW + 4):
            batch["targets"] = np.random.default_rng(number).integers(0, 255, batch["targets"].shape, np.int32)
        return batch

    monkeypatch.setattr(TrainBatches, "take", nonsense)
    config = run_of(steps=WINDOW + 6, eval_every=1000, save_every=1000, on_bad_step="skip", spike=8.0)
    folder = train(config, tmp_path / "run")
    assert [line["step"] for line in read(folder, "train") if line.get("skipped")] == [WINDOW + 5]
    assert "a spike" in read(folder, "event")[0]["message"]
