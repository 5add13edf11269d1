"""What the parts compare with: exact products, and PyTorch's kernel for the shape that is timed."""

import importlib
import sys
import types

import jax
import pytest

from benchmarks.parts import attention, experts


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
