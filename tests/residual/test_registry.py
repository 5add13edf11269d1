"""Schemes are found by name, from this package or from a user's own file."""

import dataclasses
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nagjax
from nagjax.errors import UserError
from nagjax.layers.attention import Where
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import registry
from nagjax.residual.module import Residual
from nagjax.residual.protocol import Nothing, Scheme, SublayerIndex, split_lanes
from nagjax.residual.schemes.plain import Plain
from nagjax.train.own_model import describe
from tests import tiny
from tests.tolerance import assert_close

PLACE = SublayerIndex(3, 48)
VERBS = ("open", "read", "advance", "close", "lanes")


def test_the_schemes_of_the_papers_and_their_baselines_are_there():
    assert {"plain", "lns", "review", "highway", "highway_convex", "nag"} <= set(nagjax.schemes())


def test_a_schemes_file_is_imported_as_any_module():
    import nagjax.residual.schemes.plain as file

    assert file.Plain is nagjax.find_scheme("plain")


@pytest.mark.parametrize("typed, nearest", [("revew", "review"), ("NAG", "nag"), ("planes", "plain")])
def test_an_unknown_scheme_names_the_nearest(typed, nearest):
    with pytest.raises(UserError, match=f"did you mean '{nearest}'.*known schemes: .*plain"):
        nagjax.find_scheme(typed)
    with pytest.raises(UserError, match="known schemes"):
        nagjax.find_scheme("qqqq")


@dataclasses.dataclass(frozen=True)
class Post(Scheme):
    """Post-norm, from outside the package: `h <- norm(h + f(h))`."""

    name: ClassVar[str] = "post_of_the_test"
    title: ClassVar[str] = "Post"

    def open(self, embedding, at, ends):
        return split_lanes(embedding)[0].astype(embedding.dtype)

    def read(self, stream):
        return stream

    def advance(self, stream, update, at):
        return split_lanes(stream + update)[0].astype(stream.dtype), jnp.ones((1, 1, 1))

    def close(self, stream, ends):
        return stream, jnp.zeros(stream.shape[:-1])

    def lanes(self, stream):
        return split_lanes(stream)


@pytest.fixture
def brought(monkeypatch):
    """Entry points by name, of packages that nobody has asked for yet."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_asked", set())
    points = {}
    monkeypatch.setattr(registry, "installed", lambda group: points if group == "nagjax.schemes" else {})
    return points


def test_a_scheme_of_an_installed_package_is_known(brought):
    """Also to a package that asks which schemes there are as it is imported; it is imported once."""
    asked = []
    load = lambda: asked.append("plain" in nagjax.schemes()) or Post  # noqa: E731
    brought["post_of_the_test"] = types.SimpleNamespace(load=load)
    assert nagjax.find_scheme("post_of_the_test") is Post and "post_of_the_test" in nagjax.schemes()
    assert asked == [True]


def test_a_users_own_scheme_stays_beside_an_installed_one_of_its_name(brought):
    own = registry.register(type("Own", (Post,), {}))
    brought["post_of_the_test"] = types.SimpleNamespace(load=lambda: Post)
    assert nagjax.find_scheme("post_of_the_test") is own


def test_a_broken_package_is_told_and_leaves_the_others(brought):
    def broken():
        raise ImportError("no module of that name")

    brought["broken"] = types.SimpleNamespace(load=broken)
    brought["other"] = types.SimpleNamespace(load=lambda: Post)
    with pytest.warns(UserWarning) as told:
        known = nagjax.schemes()
    assert "plain" in known and not {"broken", "other", "post_of_the_test"} & known.keys()
    first, second = sorted(str(warning.message) for warning in told)
    assert "'broken', an entry point of nagjax.schemes" in first and "no module of that name" in first
    assert "'other'" in second and "name the entry point so, too; it is 'other'" in second


def test_a_registered_scheme_is_known_and_runs(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    assert nagjax.register(Post) is Post
    assert nagjax.find_scheme("post_of_the_test") is Post
    config = ModelConfig(depth=2, width=8, heads=2, vocab=7, context=4)
    model = Transformer(config, Post(), nnx.Rngs(0))
    output = model(jnp.array([[1, 2, 3, 4]]), Where.whole(1, 4), observed=True)
    assert_close(np.mean(np.square(output.hidden), -1), 1.0, terms=64, chain=4)
    assert output.telemetry["turn"].shape == (4,)
    with pytest.raises(UserError, match="scheme = 'Nameless'"):
        nagjax.register(type("Nameless", (Post,), {"name": ""}))


class Optional(Plain):
    """Not decorated as a dataclass: its option would be a constant that no run records."""

    name: ClassVar[str] = "optional"
    factor: float = 0.5


@pytest.mark.parametrize(
    "given, said",
    [
        (type("Half", (Scheme,), {"name": "half"}), "scheme = 'Half': has to define advance, close, lanes, open, read"),
        (Optional, r"scheme = 'Optional': has options \(factor\): decorate it with @dataclasses.dataclass"),
        (nnx.Module, "scheme = 'Module': give a subclass"),
        (Plain(), "scheme = 'Plain': give a subclass"),
    ],
)
def test_what_cannot_be_a_scheme_is_refused(given, said, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(UserError, match=said):
        nagjax.register(given)
    assert not registry._registered


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda stream, gate: stream, "= '.*': has to return a pair"),
        (
            lambda stream, gate: (jax.tree.leaves(stream)[0], gate),
            "= '.*': has to return a stream such as it was given",
        ),
        (lambda stream, gate: (jax.tree.map(lambda x: x[..., :2], stream), gate), "= .*of the shapes and dtypes"),
        (
            lambda stream, gate: (jax.tree.map(lambda x: x.astype("bfloat16"), stream), gate),
            "= .*of the shapes and dtypes",
        ),
        (lambda stream, gate: (stream, None), "= None: has to return as its gate what broadcasts to"),
        (lambda stream, gate: (stream, jnp.ones(7)), r"= \(7,\): has to return as its gate"),
    ],
)
def test_an_advance_that_returns_something_else_is_named(change, said):
    @dataclasses.dataclass(frozen=True)
    class Wrong(Plain):
        name: ClassVar[str] = "wrong"

        def advance(self, stream, update, at):
            return change(*super().advance(stream, update, at))

    config = ModelConfig(depth=2, width=8, heads=2, vocab=7, context=4)
    model = nnx.eval_shape(lambda: Transformer(config, Wrong(), nnx.Rngs(0)))
    with pytest.raises(UserError, match=f"wrong.advance {said}"):
        jax.eval_shape(lambda model: model(jnp.zeros((1, 4), jnp.int32)), model)
    routed = dataclasses.replace(config, mod=ModConfig(rate=(0.5,)))
    model = nnx.eval_shape(lambda: Transformer(routed, Wrong(), nnx.Rngs(0)))
    with pytest.raises(UserError, match=f"wrong.advance {said}"):
        jax.eval_shape(lambda model: model(jnp.zeros((1, 4), jnp.int32)), model)


def test_a_scheme_of_the_package_is_not_replaced(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    for name, body, said in (
        ("Mine", {}, "scheme.name = 'plain'.* own Plain: give Mine"),  # its base's name
        ("NAG", {"name": "mine"}, "scheme = 'NAG'.* own nag"),
    ):
        with pytest.raises(UserError, match=said):
            nagjax.register(type(name, (Plain,), body))
    assert nagjax.register(Plain) is Plain and nagjax.register(Post) is nagjax.register(Post)


def defined(name, qualified="Mine"):
    """A class statement of that name, as a cell of a notebook has it, with another `name` of the scheme."""
    return type("Mine", (Plain,), {"name": name, "__qualname__": qualified})


def test_two_schemes_of_one_class_name_are_refused(monkeypatch):
    """A module is known by the name of its class."""
    monkeypatch.setattr(registry, "_registered", {})
    made = "made.<locals>.Mine"
    for first, second in (
        (defined("one"), defined("two", "Outer.Mine")),
        (defined("one", made), defined("two", made)),
        (defined("one"), type("Mine", (Plain,), {"name": "two", "__module__": "another"})),
    ):
        registry._registered.clear()
        nagjax.register(first)
        with pytest.raises(UserError, match="scheme = 'Mine'.*class of the registered scheme 'one'"):
            nagjax.register(second)
        assert nagjax.Mine.Scheme is first and "two" not in nagjax.schemes()


def test_a_cell_may_be_run_again(monkeypatch, recwarn):
    monkeypatch.setattr(registry, "_registered", {})
    for _ in range(2):
        again = nagjax.register(defined("one"))
        assert nagjax.find_scheme("one") is nagjax.Mine.Scheme is again
    assert not recwarn
    with pytest.warns(UserWarning, match="the scheme 'one' is now 'two'"):
        renamed = nagjax.register(defined("two"))
    assert "one" not in nagjax.schemes() and nagjax.Mine.Scheme is renamed


def test_a_gate_may_be_a_layer_of_flax_and_a_title_is_not_inherited(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})

    @nagjax.register
    @dataclasses.dataclass(frozen=True)
    class Layered(Plain):
        name: ClassVar[str] = "layered"

        def gate(self, width, sublayer, rngs):
            return nnx.Linear(width, width, rngs=rngs)

        def advance(self, stream, update, at):
            return super().advance(stream, at.gate(stream.hidden) * update, at)

    assert Layered.title == "layered"
    found = {path: (own.role, own.axes) for path, own in describe(Residual(Layered, 8, 2, rngs=nnx.Rngs(0))).items()}
    assert found["gate", "kernel"] == ("gate", (None,) * 3) and found["entry", "gain"] == ("norm", ("embed",))
    assert tiny.blueprint(tiny.run_config(Layered())).parameters["blocks"]["mlp"]["gate"]["bias"].role == "gate"
    nagjax.linen.Layered(8, 2).init(jax.random.key(0), jnp.ones((1, 8)), [jnp.tanh] * 2)


def test_a_gate_may_be_one_number():
    class Halved(Post):
        def advance(self, stream, update, at):
            return super().advance(stream, 0.5 * update, at)[0], jnp.float32(0.5)

    own = Residual(Halved(), 8, 2, rngs=nnx.Rngs(0))
    _, facts = own(jnp.ones((2, 8)), [jnp.tanh] * 2, observe=True)
    np.testing.assert_array_equal(facts["gate"], [0.5, 0.5])


def test_defaults_of_the_base_class():
    base = type("Bare", (Scheme,), {verb: getattr(Post, verb) for verb in VERBS})()
    assert isinstance(base.gate(8, PLACE, nnx.Rngs(0)), Nothing) and base.output_scale(PLACE) == 1.0
    table = jnp.ones((3, 2))
    assert base.head_rows(table) is table


@pytest.mark.parametrize("verb", VERBS)
def test_a_scheme_without_one_of_the_five_verbs_is_refused_by_its_name(verb):
    others = {name: getattr(Post, name) for name in VERBS if name != verb}
    with pytest.raises(TypeError, match=verb):
        type("Short", (Scheme,), others)()


def test_only_a_scheme_that_declares_it_has_an_angle_before_its_branch_runs():
    own = registry.own_schemes()
    able = {name for name, scheme in own.items() if scheme.turns}
    assert able == {name for name, scheme in own.items() if scheme.turn is not Scheme.turn} == {"nag", "nag_harmonic"}
    with pytest.raises(UserError, match="plain"):
        Plain().turn(None, None)


def test_output_projections_start_scaled_where_the_paper_scales_them():
    assert Plain(scaled_start=False).output_scale(PLACE) == 1.0
    for scheme in (Plain(scaled_start=True), nagjax.find_scheme("review")(), nagjax.find_scheme("highway")()):
        assert scheme.output_scale(PLACE) == pytest.approx(48**-0.5)
    assert nagjax.find_scheme("lns")().output_scale(PLACE) == 1.0  # not to be combined with a scaled start
