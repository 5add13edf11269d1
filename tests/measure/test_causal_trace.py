"""Causal traces: noise at the subject alone, and one token's stream put back, against a second way to compute it."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.data import load_tokenizer
from nagjax.errors import UserError
from nagjax.measure.causal_trace import Trace, handover, summary, trace, trace_text
from nagjax.measure.interventions import rebuilt, residual, through
from nagjax.mod import ModConfig
from nagjax.residual import find_scheme
from nagjax.runs.opening import OpenRun
from tests import tiny
from tests.tiny import VOCAB, blueprint, fresh, moved, run_config
from tests.tolerance import assert_close

BPE = Path(__file__).parents[2] / "models" / "plain-24" / "tokenizer.json"
IDS, SUBJECT, ANSWER = [5, 9, 3, 17, 4, 30, 8], (1, 3), 11
KINDS = {
    "plain": {},
    "nag": {"positions": "learned"},
    "review": {"tied": True},
    "mhc": {},
    "hyper_connections": {},
    "denseformer": {},
    "block_attn_res": {},
    "lns": {"mod": ModConfig(rate=(0.5,))},
}


@functools.cache
def run_of(name="plain", tokenizer=None, **changes):
    plan = blueprint(run_config(find_scheme(name)(), **changes))
    return OpenRun(Path("run"), plan, 100, moved(fresh(plan).params, 0.3), {}, tokenizer or load_tokenizer("bytes"))


def table(run):
    return np.asarray(run.params["embedding"]["tokens"])


@pytest.mark.parametrize("name", KINDS)
def test_what_is_put_back_everywhere_is_the_clean_prompt(name):
    run = run_of(name, **KINDS[name])
    found = trace(run, IDS, (2, 3), ANSWER, draws=2)
    assert found.restored.shape == (4, len(IDS)) and 0 < found.clean < 1
    assert abs(found.clean - found.corrupted) > 1e-3 * found.clean
    close = functools.partial(assert_close, **tiny.FORWARD)
    close(found.restored[:, :2], np.full((4, 2), found.corrupted))
    close(found.restored[0, 2], found.clean)  # the subject's only token, as it is embedded
    close(found.restored[0, 3:], np.full(4, found.corrupted))  # there is no noise to take away
    close(found.restored[-1, :-1], np.full(6, found.corrupted))  # nobody reads them
    close(found.restored[-1, -1], found.clean)
    assert np.ptp(found.restored[1:3, 2:]) > 0
    np.testing.assert_array_equal(found.ends, found.effect[:, [2, 6]])
    # Of the model itself.
    output = run.model(jnp.array([IDS], jnp.int32), progress=run.progress)
    close(found.clean, jax.nn.softmax(run.model.logits(output)[0, -1])[ANSWER])


def test_a_trace_is_what_two_passes_make_of_it():
    """Noise on the table's rows is noise on the subject, whose ids stand nowhere else; the residual is put back by
    hand."""
    run = run_of("plain")
    found = trace(run, IDS, slice(*SUBJECT), ANSWER, noise=2.0, draws=1, seed=4)
    rows = table(run)[IDS[1:3]]
    noise = np.random.default_rng(4).standard_normal((1, 2, 16), np.float32)[0]
    other = table(run).copy()
    other[IDS[1:3]] += 2.0 * rows.std() * noise
    noised = run.params | {"embedding": run.params["embedding"] | {"tokens": jnp.asarray(other)}}
    model, tokens = run.blueprint.model, jnp.array([IDS], jnp.int32)

    def watch(model, stream, call):
        return through(model, stream, call), residual(model.scheme, stream)

    @jax.jit
    def put_back(block, token):
        clean = model(run.params)(tokens, intervene=watch).seen

        def intervene(model, stream, call):
            own, here = residual(model.scheme, stream), call.layer.block_index
            h = jnp.where((here == block) & (jnp.arange(len(IDS)) == token)[:, None], clean[here], own)
            return through(model, rebuilt(model, h, call), call), ()

        own = model(noised)
        return jax.nn.softmax(own.logits(own(tokens, intervene=intervene))[0, -1])[ANSWER]

    assert_close(found.corrupted, put_back(3, 0), **tiny.FORWARD)
    expected = [[put_back(block, token) for token in range(1, 7)] for block in range(3)]
    assert_close(found.restored[:3, 1:], np.array(expected), **tiny.FORWARD)
    # In several batches, and of some tokens.
    some = trace(run, IDS, SUBJECT, ANSWER, noise=2.0, draws=1, seed=4, places=[2, 6])
    assert_close(some.restored[:, [2, 6]], found.restored[:, [2, 6]], **tiny.FORWARD)
    assert np.isnan(some.restored[:, [1, 3, 4, 5]]).all()


def test_batches_of_a_trace_are_cut_anywhere(monkeypatch):
    whole = trace(run_of(), IDS, SUBJECT, draws=3)
    monkeypatch.setattr("nagjax.measure.causal_trace.ROWS", 8)
    cut = trace(run_of(), IDS, SUBJECT, draws=3)
    assert cut.answer == whole.answer
    assert_close(cut.restored, whole.restored, **tiny.FORWARD)


def test_the_likeliest_token_is_the_answer_unless_there_is_one():
    run = run_of()
    likeliest = int(np.argmax(run.model.logits(run.model(jnp.array([IDS], jnp.int32)))[0, -1]))
    found = trace(run, IDS, SUBJECT, draws=1, places=())
    assert found.answer == likeliest and np.isnan(found.restored[:, 1:]).all()


@pytest.mark.parametrize(
    "field, given",
    [
        ("subject", {"subject": (3, 3)}),
        ("subject", {"subject": (-1, 2)}),
        ("subject", {"subject": (2, 8)}),
        ("subject", {"subject": slice(0, 4, 2)}),
        ("subject", {"subject": 3}),
        ("answer", {"answer": VOCAB}),
        ("answer", {"answer": "a"}),
        ("ids", {"ids": []}),
        ("ids", {"ids": [1] * 9}),
        ("ids", {"ids": [1, 2, VOCAB]}),
        ("ids", {"ids": "text"}),
        ("places", {"places": [0]}),
        ("places", {"places": [7]}),
        ("draws", {"draws": 0}),
        ("noise", {"noise": 0.0}),
        ("noise", {"noise": -1.0}),
        ("seed", {"seed": -1}),
    ],
)
def test_what_cannot_be_traced_is_refused(field, given):
    with pytest.raises(UserError) as error:
        trace(run_of(), **{"ids": IDS, "subject": SUBJECT, "answer": ANSWER} | given)
    assert error.value.field == field


def test_encoders_and_drawn_routes_are_refused():
    with pytest.raises(UserError, match="causal"):
        trace(run_of(causal=False, tied=True, head_epsilon=1e-5), IDS, SUBJECT)
    with pytest.raises(UserError, match="mod.router"):
        trace(run_of(mod=ModConfig(rate=(0.5,), router="random")), IDS, SUBJECT)


def test_a_text_of_bytes():
    run = run_of(vocab=257, context=32)
    found = trace_text(run, "ä needle in ä", " needle", " x", draws=1)
    assert found.subject == (2, 9) and found.answer == ord(" ")
    assert "".join(found.tokens[2:9]) == " needle" and len(found.tokens) == 15
    assert found.restored.shape == (4, 15)
    assert trace_text(run, "ä needle", "ä", draws=1, places=()).subject == (0, 2)


def test_a_token_that_a_border_cuts_is_the_subject_s():
    tokenizer = load_tokenizer(str(BPE))
    run = run_of(tokenizer=tokenizer, vocab=tokenizer.vocab_size, context=32)
    prompt = "import sys\n\ndef main():\n    return"
    found = trace_text(run, prompt, "main", " self", draws=1, places=())
    pieces = [found.tokens[i] for i in range(*found.subject)]
    assert "".join(found.tokens) == prompt and "".join(pieces) == " main"  # with the blank in front of it
    assert tokenizer.decode([found.answer]) == " self"
    inside = trace_text(run, prompt, "ai", draws=1, places=())
    assert inside.subject == found.subject


def test_texts_that_cannot_be_traced_are_refused():
    tokenizer = load_tokenizer(str(BPE))
    run = run_of(tokenizer=tokenizer, vocab=tokenizer.vocab_size, context=32)
    for field, given in {
        "subject": ("import sys", "os", None),
        "answer": ("import s", "import", "ys"),
        "prompt": ("a <|endoftext|> b", "a", None),
    }.items():
        with pytest.raises(UserError) as error:
            trace_text(run, *given)
        assert error.value.field == field
    with pytest.raises(UserError, match="answer"):
        trace_text(run, "import sys", "sys", "")
    with pytest.raises(UserError, match="subject"):
        trace_text(run, "import sys", "")


def test_where_the_last_token_takes_over():
    assert handover(np.array([3.0, 2, 1, 0]), np.array([0.0, 1, 2, 3])) == 2 / 3
    assert handover(np.array([0.0, 2, 1, 0]), np.array([1.0, 1, 1, 3])) == 1  # not above at 2
    assert handover(np.array([0.0, 0]), np.array([1.0, 1])) == 0
    assert np.isnan(handover(np.array([0.0, 0]), np.array([1.0, 0])))
    one = Trace(0.9, 0.1, np.array([[0.1, 0.9, 0.1], [0.1, 0.5, 0.7]]), 0, (0, 2))
    other = one._replace(restored=one.restored - 0.2)
    found = summary([one, other])
    np.testing.assert_allclose(found.subject, [0.7, 0.3])
    np.testing.assert_allclose(found.last, [-0.1, 0.5])
    assert found.handover == 1
    with pytest.raises(UserError, match="traces"):
        summary([])
