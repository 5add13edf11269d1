"""The order for a compiler process: a run's config with every default resolved for its platform."""

import dataclasses
import math
import shlex

from nagjax.errors import UserError
from nagjax.layers import cudnn, flash
from nagjax.layers.splash import BLOCK, refusal
from nagjax.mod.adaptive import sizes
from nagjax.mod.config import kept
from nagjax.options import options_of_run, run_options
from nagjax.plan.topology import Topology
from nagjax.runs.config import MeshConfig, RunConfig
from nagjax.train.distributed.mesh import AXES, batch_parts, check_experts, check_platform, check_rows, check_sequence
from nagjax.train.warm_start import OF_THE_MACHINE, adopted

TOKENS_PER_CHIP = 8192  # default for the number of tokens in a batch


@dataclasses.dataclass(frozen=True)
class Choices:
    """What `auto` means on the platform, and how the compiled program differs from the one that would run there."""

    dtype: str
    attention: str
    notes: tuple[str, ...] = ()


def choose(config: RunConfig, topology: Topology) -> tuple[RunConfig, Choices]:
    """The config to compile, and the choices made for its platform. For a TPU the worker resolves "auto" attention."""
    model, notes = config.model, []
    dtype = "bfloat16" if model.dtype == "auto" else model.dtype
    attention = model.attention
    if topology.chip.platform == "tpu":
        taken = attention if attention != "auto" else _on_tpu(config, topology)
    else:
        why = _no_cudnn(config, dtype, topology)
        if attention == "cudnn" and why:
            raise UserError("attention", attention, f"{why}; give auto, xla or tokamax")
        fits_cudnn = why is None
        if attention == "auto" and fits_cudnn and _outgrows_cudnn(config, topology):
            attention = "tokamax"
        if attention == "cudnn" or attention == "auto" and fits_cudnn:
            notes.append(
                "a GPU run uses cuDNN attention, which cannot be compiled without a GPU: planned with XLA's, which "
                "writes all scores to memory, so memory and bytes are upper bounds (--attention tokamax is planned as "
                "it is)"
            )
        attention = taken = "tokamax" if attention == "tokamax" else "xla"
    if taken != "xla" and any(window is not None and window < model.context for window in model.windows):
        notes.append(
            "attention kernels are counted for all tokens before a query, also where they see a window of these: "
            "matmuls and their time are upper bounds, and MFU may be above the one told"
        )
    if model.mod.active and model.mod.adaptive:
        notes.append(
            "routed sublayers are counted for all tokens, the largest of adaptive capacity's sizes: FLOPs, bytes and "
            "time are upper bounds, and MFU may be above the one told"
        )
    model = dataclasses.replace(model, dtype=dtype, attention=attention)
    return dataclasses.replace(config, model=model), Choices(dtype, taken, tuple(notes))


def _no_cudnn(config: RunConfig, dtype: str, topology: Topology) -> str | None:
    """Why cuDNN's attention cannot run this model on these GPUs; None if it can."""
    if dtype != "bfloat16":
        return f"takes bfloat16, not {dtype}"
    if config.model.block.softcap is not None:
        return "does not support block.softcap"
    if config.mesh.sequence > 1:
        return "does not support --mesh.sequence"
    return cudnn.width_refusal(config.model.head_width, cudnn.is_hopper_or_newer(topology.chip.title))


def _outgrows_cudnn(config: RunConfig, topology: Topology) -> bool:
    """Whether "auto" chooses tokamax's kernels on these GPUs, assuming that tokamax is installed there if it is
    here."""
    model, rows = config.model, _rows(config, topology)
    if not flash.named_hopper(topology.chip.title) or model.mod.kv == "selected":
        return False
    return flash.too_dense(rows, model.context, model.context, 2) and flash.tokamax_installed()


def _rows(config: RunConfig, topology: Topology) -> int:
    """The number of sequences that a device attends to at once; a sequence split over tokens or heads counts on each of
    its devices."""
    together = config.mesh.tensor * config.mesh.sequence
    return math.ceil(config.train.batch // config.train.accumulate * together / topology.size)


def _on_tpu(config: RunConfig, topology: Topology) -> str:
    """The attention that "auto" chooses on a TPU, in words."""
    model, parts, windows = config.model, config.mesh.sequence, {*config.model.windows}
    window = model.context if len(windows) > 1 else windows.pop()  # windows that differ are traced
    if model.block.softcap is not None or refusal(
        model.context, model.context, _rows(config, topology), parts, window, model.causal
    ):
        return "xla"
    rates = {rate for rate, _ in model.mod.rates(model.depth) if 0.0 < rate < 1.0 and model.mod.kv == "selected"}
    seen = [sizes(model.context) if model.mod.adaptive else (kept(rate, model.context),) for rate in rates]
    broken = any(count % BLOCK for counts in seen for count in counts)
    return f"splash (xla where selected keys are not in whole blocks of {BLOCK})" if broken else "splash"


def started(config: RunConfig) -> RunConfig:
    """The config with the model and scheme of the run in `config.start`, as training would take them; a plan reads no
    corpus. Raises UserError if there is no run, or if it cannot be trained."""
    config = adopted(config, None)
    config.model.check_causal("training")
    return config


def filled(config: RunConfig, topology: Topology, vocab: int, batch_given: bool, mesh_given: bool) -> RunConfig:
    """The config with this vocabulary, and with defaults for a batch and a mesh that were not given: everything is
    sharded over all chips, and each chip gets about `TOKENS_PER_CHIP` tokens at once. Raises UserError for an
    implementation that runs on another platform, and for a mesh that does not fill the topology."""
    check_platform(config.model, "tpu" if topology.chip.platform == "tpu" else "gpu")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab=vocab))
    if not mesh_given:
        config = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=topology.size))
    if not batch_given:
        shape = _sizes(config.mesh, topology)
        rows = max(1, shape["sequence"] * TOKENS_PER_CHIP // config.model.context)
        batch = batch_parts(shape) * rows * config.train.accumulate
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch=batch))
    return config


def mesh_shape(config: RunConfig, topology: Topology) -> dict[str, int]:
    """The number of devices along every axis of the run's mesh, in the mesh's order.

    Raises UserError if the mesh does not fill the topology, or does not divide batch or context.
    """
    shape = _sizes(config.mesh, topology)
    check_rows(config.train.batch, config.train.accumulate, shape)
    check_sequence(config.model, shape)
    check_experts(config.model, shape)
    return shape


def _sizes(mesh: MeshConfig, topology: Topology) -> dict[str, int]:
    given = {axis: getattr(mesh, axis) for axis in AXES}
    rest = math.prod(size for size in given.values() if size is not None)
    shape = {name: max(topology.size // rest, 1) if size is None else size for name, size in given.items()}
    if math.prod(shape.values()) != topology.size:
        raise UserError(
            "mesh",
            tuple(shape.values()),
            f"{topology.name} has {topology.size} chips: the product {' x '.join(shape)} must be {topology.size}",
        )
    return shape


def options(config: RunConfig, shape: dict[str, int]) -> str:
    """The run's command line in shell syntax: size, batch, mesh, and every other option that defines the run."""
    found, changed = options_of_run(config)
    always = {"depth", "width", "context", "batch"}
    flags = [] if config.start else [f"--scheme {found.name}"]
    told = [option.name for option in run_options(found.name) if option.name in changed | always]
    for name in sorted(told, key=lambda name: name not in always):
        if name != "scheme" and not name.startswith("mesh.") and not (config.start and _of_start(config, name)):
            flags.append(_flag(name.replace("_", "-"), found.value(name)))
    return " ".join(flags + [f"--mesh.{axis} {size}" for axis, size in shape.items() if size > 1])


def _of_start(config: RunConfig, option: str) -> bool:
    """Whether the run to start from decides an option's value, so that the command line cannot."""
    group = option.partition(".")[0]
    return group == "scheme" or group in vars(config.model) and group not in ("lora", *OF_THE_MACHINE)


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        group, dot, field = name.rpartition(".")
        return f"--{name}" if value else f"--{group}{dot}no-{field}"
    values = value if isinstance(value, tuple | list) else (value,)
    return " ".join([f"--{name}", *(shlex.quote(str(own)) for own in values)])
