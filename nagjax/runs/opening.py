"""Opens a run from what training left in its folder."""

import dataclasses
import inspect
import shlex
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from nagjax.data import Tokenizer, load_tokenizer
from nagjax.data.tokenizer import JsonTokenizer, NoTokenizer, beginning_of
from nagjax.errors import UserError
from nagjax.files import has_file, inside, read_json, read_record
from nagjax.mod import ModConfig
from nagjax.model.transformer import Transformer
from nagjax.ranges import Count, Fraction, Natural, check_value
from nagjax.runs.blueprint import ModelBlueprint, Tree
from nagjax.runs.config import MeshConfig, RunConfig
from nagjax.runs.folder import read_config
from nagjax.runs.names import CALIBRATION, GENERATION_CONFIG, ORIGIN, TOKENIZER
from nagjax.runs.weights import read_weights
from nagjax.train.distributed.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The calibration of a dense NAG run: the rate of skipping asked for, the threshold on the tangent of NAG's angle
    that gives it, and the step at which it was calibrated (None: by a version that did not store it)."""

    rate: Fraction
    threshold: float
    step: Natural | None = None


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of an imported run: the size of its tokenizer (None: it came without one), the id that ends a text,
    and the config.json of the model it was imported from."""

    tokenizer_vocab: Count | None
    end_of_text: Natural
    config: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class OpenRun:
    """A run at its newest checkpoint: the parameters, and all that is needed to use them."""

    folder: Path
    blueprint: ModelBlueprint
    step: int  # training steps done
    params: Tree
    mod: dict  # the state of Mixture-of-Depths: `cuts` [S], empty without it
    tokenizer: Tokenizer
    calibrated: bool = False  # it has thresholds, but no capacities
    eos: tuple[int, ...] = ()  # token ids at which an imported model ends its text, from `read_eos`

    @property
    def config(self) -> RunConfig:
        return self.blueprint.config

    @property
    def progress(self) -> float:
        """Share of the configured training that is done."""
        return self.step / self.config.train.steps

    @cached_property
    def model(self) -> Transformer:
        """The model with these parameters. For a run that is not finished, pass `progress` too, as in
        `run.model(tokens, progress=run.progress)`: NAG's step sizes and ProRes's weights are smaller early in
        training."""
        return self.blueprint.model(self.params)

    @cached_property
    def beginning(self) -> list[int]:
        """The token ids that an imported model expects before every text, from its tokenizer.json; empty for other
        runs."""
        return beginning_of(self.tokenizer)

    def __repr__(self) -> str:
        model, count = self.config.model, sum(p.size for p in jax.tree.leaves(self.blueprint.parameters))
        facts = [
            f"{self.config.scheme.title}, {model.depth} blocks x {model.width}",
            f"{model.heads} heads of {model.head_width} on {model.kv_heads} keys",
            f"{count:,} parameters",
            f"context {model.context:,}",
            f"vocabulary {model.vocab:,} ({self.tokenizer.name})",
            f"computes in {model.compute_dtype.name}",
            f"step {self.step}",
        ]
        if self.calibrated:
            facts.append(f"skips by angle at the calibrated rate {model.mod.rate[0]:g}")
        elif model.mod.active:
            facts.append("Mixture-of-Depths")
        return f"OpenRun({str(self.folder)!r}: {'; '.join(facts)})"

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, a list of ints, behind those that an imported model expects before it (`beginning`).
        For a bidirectional model they follow its tokenizer.json: between [CLS] and [SEP], and "[MASK]" in the text
        becomes that token. Raises UserError if `text` is not a str."""
        check_text(text)
        if not self.config.model.causal and isinstance(self.tokenizer, JsonTokenizer):
            return self.tokenizer.encode_whole(text).tolist()
        return [*self.beginning, *self.tokenizer.encode(text).tolist()]

    def logits(self, text: str) -> Float[Array, "T V"]:
        """Float32 logits after every token of a text (for a bidirectional model: at every token), from one pass over
        the ids that `encode` gives. In a routed model the causal decider chooses tokens if its cuts are known; experts
        of a causal model drop no choice.

        Raises UserError for a text of no tokens or of more than the context, and for an encoder without a head.
        """
        self.config.model.check_logits("run.logits")
        ids, model, cuts = self.encode(text), self.config.model, self.mod.get("cuts")
        if not 0 < len(ids) <= model.context:
            raise UserError("text", f"{len(ids)} tokens", f"give 1 to {model.context}, the context")
        causal = model.causal and (cuts is not None or not model.mod.active)
        output = self.model(jnp.asarray([ids], jnp.int32), progress=self.progress, cuts=cuts, causal=causal)
        return self.model.logits(output)[0]

    def routed(self, mod: ModConfig, cuts: Array | None = None) -> "OpenRun":
        """The same parameters under another Mixture-of-Depths, which must not need parameters of its own.

        With an inactive `mod` this is the dense model. `cuts` [S] are its thresholds; None: it has none.
        """
        model = dataclasses.replace(self.config.model, mod=mod)
        blueprint = ModelBlueprint.of(dataclasses.replace(self.config, model=model), self.blueprint.mesh)
        blocks = {
            kind: {name: own for name, own in parts.items() if name != "routing"}
            for kind, parts in self.params["blocks"].items()
        }
        state = {} if cuts is None else {"cuts": jnp.asarray(cuts, jnp.float32)}
        return dataclasses.replace(self, blueprint=blueprint, params=self.params | {"blocks": blocks}, mod=state)


def check_opened(run: Any) -> None:
    """Raises UserError if `run` is not an opened run, for example a path or a model."""
    if isinstance(run, str | Path):
        raise UserError("run", str(run), f"is not opened: give nagjax.load({str(run)!r})")
    if isinstance(run, nnx.Module):
        fix = "is a model without tokenizer and config: give what nagjax.load or nagjax.fit returns"
        raise UserError("run", type(run).__name__, fix)
    # getattr_static, because reading `run.model` would build the model
    if any(inspect.getattr_static(run, name, None) is None for name in ("model", "tokenizer")):
        raise UserError("run", type(run).__name__, "give what nagjax.load or nagjax.fit returns")


def check_text(text: Any) -> None:
    """Raises UserError if `text` is not a str."""
    if not isinstance(text, str):
        reads_ids = "run.model(tokens, progress=run.progress) and nagjax.generate.sample.generate"
        raise UserError("text", type(text).__name__, f"give a text; token ids are read by {reads_ids}")


def devices_of(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """The devices given; None: one local device. Raises UserError for anything but a list of devices."""
    found = list(jax.local_devices()[:1] if devices is None else devices if np.iterable(devices) else [devices])
    if not found or not all(isinstance(device, jax.Device) for device in found):
        raise UserError("devices", devices, "give a list of devices, such as jax.local_devices()[:2]")
    return found


def open_run(folder: str | Path, *, devices: Sequence[jax.Device] | None = None, calibrated: bool = True) -> OpenRun:
    """Opens the run in `folder`, finished or not. Nothing in the folder changes, and the run may be training meanwhile.

    Adapters are merged into the matrices, so the opened model has none. A run that `nagjax calibrate` has set to a rate
    is opened at that rate, unless `calibrated` is False. devices: parameters and batches are split over them; None: one
    local device.

    Raises UserError if the folder is not a run, if its config cannot be read or names an unknown scheme or field, if
    there is no checkpoint yet or it is damaged, if the tokenizer is not the one that the run was trained with, and if
    the calibration was made at another step.
    """
    check_value("run", folder, Path, "the folder of a run")
    folder = Path(folder)
    config = read_config(folder)
    devices = devices_of(devices)
    found = read_weights(folder, config, make_mesh(MeshConfig(data=1, fsdp=len(devices)), devices))
    origin, vocab = read_origin(folder), config.model.vocab
    tokenizer = tokenizer_of(folder, vocab, origin)
    eos = read_eos(origin.config if origin else {}, folder, vocab)
    run = OpenRun(folder, found.blueprint, found.step, found.params, found.mod, tokenizer, eos=eos)
    return at_point(run, folder) if calibrated else run


def at_point(run: OpenRun, folder: Path) -> OpenRun:
    """The run at the rate that `nagjax calibrate` has saved in `folder`, or unchanged if there is none. Raises
    UserError if the run was at another step then: the threshold belongs to other weights."""
    point = read_calibration(folder)
    if point is None:
        return run
    if point.step not in (None, run.step):
        fix = f"is of step {point.step}, and the run is at step {run.step}: {_again(folder)}"
        raise UserError("calibration", str(folder / CALIBRATION), fix)
    at = run.routed(by_angle(point.rate), jnp.full(run.config.model.sublayers, point.threshold, jnp.float32))
    return dataclasses.replace(at, calibrated=True)


def by_angle(rate: float) -> ModConfig:
    """The routing rule of a calibrated run: one threshold on NAG's angle for all sublayers. The rate is nominal
    only."""
    return ModConfig(rate=(rate,), router="nag", decider="threshold", kv="all")


def read_calibration(folder: Path) -> Calibration | None:
    """The calibration that `nagjax calibrate` has saved in the run's folder; None if there is none.

    Raises UserError if it cannot be read.
    """
    return read_record(Calibration, folder / CALIBRATION, "calibration", _again(folder), others=(Calibration,))


def _again(folder: Path) -> str:
    return f"remove it, or calibrate again (nagjax calibrate {shlex.quote(str(folder))})"


def read_origin(folder: Path) -> Origin | None:
    """What `nagjax import` stored in a run's folder; None if the run was not imported. Raises UserError if it cannot be
    read."""
    return read_record(Origin, folder / ORIGIN, "run", "bring it back, or import again", others=(Origin,))


def read_eos(config: dict, folder: Path, vocab: int) -> tuple[int, ...]:
    """The ids in `eos_token_id` (one or several) of an imported model's config.json and of the generation_config.json
    in its folder, if there is one; ids outside the vocabulary are left out. Raises UserError if the file cannot be
    read."""
    path, generation = folder / GENERATION_CONFIG, None
    if has_file(path):
        try:
            generation = read_json(path)
        except (OSError, ValueError) as error:
            raise UserError("run", str(path), f"cannot be read ({error}): bring it back, or remove it") from None
    named = [values.get("eos_token_id") for values in (config, generation) if isinstance(values, dict)]
    ids = [i for one in named for i in (one if isinstance(one, list) else [one])]
    return tuple(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < vocab))


def option_of(tokenizer: Tokenizer, folder: Path) -> str:
    """The value of `--tokenizer` that gives a command the tokenizer of the run in `folder`: its file, or "bytes"."""
    return "bytes" if tokenizer.to_json() is None else str(folder / TOKENIZER)


def tokenizer_of(folder: Path, vocab: int, origin: Origin | None) -> Tokenizer:
    """The tokenizer of a run with this vocabulary and origin, from the copy in its folder, so no corpus is needed; a
    run on bytes has no file. Raises UserError if it is not the one that the run was trained with."""
    path, then = folder / TOKENIZER, vocab
    if origin is not None:
        if origin.tokenizer_vocab is None:
            return NoTokenizer(vocab, origin.end_of_text)
        then = origin.tokenizer_vocab
    tokenizer = load_tokenizer(str(inside(path)) if has_file(path) else "bytes")
    if tokenizer.vocab_size != then:
        now = tokenizer.vocab_size
        fix = f"{path} is missing or was changed: it has {now} tokens, the run was trained with {then}; bring it back"
        raise UserError("tokenizer", tokenizer.name, fix)
    return tokenizer
