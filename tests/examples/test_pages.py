"""The Python blocks of every page run in its order, with fewer steps; what comments say of values' shapes holds."""

import ast
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nagjax
from nagjax.data.chat_template import DEFAULT, FILE
from nagjax.interop.exporting import export
from nagjax.residual import registry
from tests.interop.test_export import PLAIN, run_of

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
PAGES = {
    str(path.relative_to(ROOT)): blocks
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
    if (blocks := BLOCK.findall(path.read_text(encoding="utf-8")))
}
ELSEWHERE = ("import pandas", "from transformers import")  # packages that tests do without
SHORTER = {"depth=8": "depth=2", "steps=60": "steps=2", "steps=20": "steps=2"}
WIDTH, SUBLAYERS = 512, 24


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.product = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        return mask * self.product(x)


def mlp(width, rngs):
    return nnx.Linear(width, width, rngs=rngs)


def model_of_ones_own():
    rngs = nnx.Rngs(0)
    own = types.SimpleNamespace(branches=nnx.List([mlp(WIDTH, rngs) for _ in range(SUBLAYERS)]))
    own.residual = nagjax.NAG(width=WIDTH, sublayers=SUBLAYERS, rngs=rngs)
    x = jax.random.normal(jax.random.key(0), (2, 4, WIDTH))
    return dict(self=own, model=own.residual, MLP=mlp, rngs=rngs, x=x, progress=0.5, step=1, steps=2)


def stacked_model():
    known = model_of_ones_own()
    known["self"].branches = nnx.vmap(Stacked)(nnx.Rngs(0).split(SUBLAYERS))
    return known | dict(mask=jnp.ones((2, 4, 1)))


def short_run(out):
    nagjax.fit("plain", depth=2, width=16, context=64, steps=2, batch=8, out=out)
    return {}


def tuned():
    short_run("runs/tuned")
    Path("runs/tuned", FILE).write_text(DEFAULT)
    return {"nagjax": nagjax}


def imported():
    short_run("runs/imported")
    scheme, shape = PLAIN["bert"]
    export(
        run_of(nagjax.find_scheme(scheme)(), Path("encoder"), **shape | {"context": 64}),
        Path("google-bert/bert-base-uncased"),
    )
    return {}


def sharded_rows():
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return {"mesh": mesh, "step": lambda x: x, "jax": jax}


# What the text around a page's blocks presumes.
BEFORE = {
    "README.md": lambda: model_of_ones_own() | {"nagjax": nagjax, "nnx": nnx, "optax": optax},
    "docs/fine_tuning.md": tuned,
    "docs/getting_started.md": dict,
    "docs/import.md": imported,
    "docs/kernels.md": dict,
    "docs/logs.md": lambda: short_run("runs/first"),
    "docs/looking_inside.md": lambda: short_run("runs/plain"),
    "docs/own_models.md": model_of_ones_own,
    "docs/write_a_scheme.md": dict,
    "pallas_kernels/README.md": sharded_rows,
}
# Blocks with these calls have branches of another kind than the block before.
ANEW = {"nnx.scan(": stacked_model, "self.routed(": model_of_ones_own}


def run_block(code, known):
    """Statement by statement, with the shapes that comments behind values tell: `found.effect  # [blocks, tokens]`."""
    for node in ast.parse(code).body:
        lines, target = code.splitlines()[node.lineno - 1 : node.end_lineno], getattr(node, "targets", [None])[0]
        if isinstance(node, ast.Expr):
            value = eval(compile(ast.Expression(node.value), "page", "eval"), known)
        else:
            exec(compile(ast.Module([node], []), "page", "exec"), known)
            value = target and eval(ast.unparse(target), known)
        comment = lines[-1].partition("  # ")[2] if len(lines) == 1 else ""
        shapes = re.findall(r"\[([^\]]*)\]", comment) if re.match(r"(\w+ )?\[", comment) else []
        for array, shape in zip(value if isinstance(value, tuple) else [value], shapes, strict=False):
            sizes, found = [size.strip() for size in shape.split(",")], np.shape(array)
            assert len(found) == len(sizes), (lines[-1], found)
            assert all(int(size) == n for size, n in zip(sizes, found, strict=True) if size.isdigit()), (shape, found)


@pytest.mark.parametrize("page", PAGES)
def test_its_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    known = BEFORE[page]() | {"__name__": "page"}
    for block in PAGES[page]:
        if any(package in block for package in ELSEWHERE):
            continue
        for call, make in ANEW.items():
            known |= make() if call in block else {}
        for printed, shorter in SHORTER.items():
            block = block.replace(printed, shorter)
        run_block(block, known)


def test_every_page_is_known():
    assert PAGES.keys() == BEFORE.keys()
