"""What the parts compare with: exact products, and PyTorch's kernel for the shape that is timed; and the attention with
which they measure steps."""

import importlib
import sys
import types

import jax
import pytest

from benchmarks.parts import attention, experts, steps, training
from benchmarks.parts.rows import Options
from nagjax.mod import ModConfig


def products(program, *args):
    """How many matrix products a program has, and how many of them are of the highest precision."""
    text = str(jax.make_jaxpr(program)(*args))
    return text.count("dot_general"), text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")


@pytest.mark.parametrize(
    "part, least, arguments",
    [(attention, 5, ((1, 16, 2, 8), 2, "xla")), (experts, 3, ((64, 4, 16, 32), "chosen"))],
    ids=("attention", "experts"),
)
def test_exact_products_are_of_full_precision_in_both_passes(part, least, arguments, monkeypatch):
    """The first program that a part runs gives the exact values."""
    counted, jit = [], jax.jit

    def counting(program, **options):
        return lambda *args: counted.append(products(program, *args)) or jit(program, **options)(*args)

    monkeypatch.setattr(part, "milliseconds", lambda run: 0.0)
    monkeypatch.setattr(jax, "jit", counting)
    part.measure(*arguments)
    (exact, full), (timed, default) = counted
    assert exact == full >= least and timed >= least and default == 0


@pytest.mark.parametrize("fault", ["raises", "is not finite"])
def test_steps_are_measured_with_xla_s_attention_where_that_of_auto_fails(fault, tmp_path, monkeypatch, capsys):
    """It is tried once at a shape, and says why."""
    tried, attend, size = [], attention.attend, steps.sizes(True)[0]

    def failing(q, *rest):
        assert rest[-1] == "auto"
        tried.append(q.shape)
        if fault == "raises":
            raise RuntimeError("no plan\nof cuDNN")
        return attend(q, *rest) * float("nan")

    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend", failing)
        attention._chosen.cache_clear()
        found = [steps.blueprint_of(size, scheme).config.model for scheme in ("plain", "nag")]
        monkeypatch.setattr(training, "_tokenizer", lambda *_: tmp_path / "bpe.json")
        trained = training._config("plain", 4, Options(True, tmp_path, 0.0)).model
    attention._chosen.cache_clear()
    assert [model.attention for model in (*found, trained)] == ["xla"] * 3
    assert tried == [(2, 16, found[0].heads, found[0].head_width), (8, 16, trained.heads, trained.head_width)]
    why = "RuntimeError: no plan" if fault == "raises" else "FloatingPointError: values that are not finite"
    told = f"attention at {list(tried[0])} with 16 queries: XLA's, as that of auto failed: {why}"
    assert told in capsys.readouterr().out
    assert steps.blueprint_of(size, "plain").config.model.attention == "auto"


def test_attention_is_tried_with_as_many_queries_as_are_routed(monkeypatch):
    """cuDNN may refuse those alone."""
    attend, size = attention.attend, steps.sizes(True)[0]

    def failing(q, *rest):
        if q.shape[1] == 8:
            raise RuntimeError("no plan")
        return attend(q, *rest)

    monkeypatch.setattr(attention, "attend", failing)
    attention._chosen.cache_clear()
    by_rate = {rate: steps.blueprint_of(size, "nag", mod=ModConfig(rate=(rate,))).config.model for rate in (0.0, 0.5)}
    attention._chosen.cache_clear()
    assert {rate: model.attention for rate, model in by_rate.items()} == {0.0: "auto", 0.5: "xla"}


def test_torch_compiles_each_shape_for_itself(monkeypatch):
    calls = []
    torch = types.SimpleNamespace(
        autograd=types.SimpleNamespace(Function=object),
        _dynamo=types.SimpleNamespace(reset=lambda: calls.append("reset")),
        compile=lambda function, **options: calls.append((function.__name__, options)),
    )
    testing = types.SimpleNamespace(do_bench=None, do_bench_cudagraph=None)
    triton = types.SimpleNamespace(jit=lambda function: function, language=types.SimpleNamespace(), testing=testing)
    known = {"torch": torch, "triton": triton, "triton.language": triton.language, "triton.testing": testing}
    for name, stand_in in known.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.delitem(sys.modules, "benchmarks.parts.peers", raising=False)
    peers = importlib.import_module("benchmarks.parts.peers")
    monkeypatch.delitem(sys.modules, "benchmarks.parts.peers")
    peers.compiled()
    assert calls == ["reset", ("_eager", {"dynamic": False})]
