"""Announces a run in one line and checks that the devices have enough memory, before anything is created."""

import math
from pathlib import Path

import jax

from nagjax.console import note, say
from nagjax.data import Dataset, Mixture
from nagjax.errors import UserError
from nagjax.runs.trained import count_trained
from nagjax.train.distributed.mesh import batch_parts, parameter_sharding
from nagjax.train.head_loss import chunk_tokens, even_parts
from nagjax.train.state import Blueprint
from nagjax.train.unused import unused

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")


def announce(blueprint: Blueprint, title: str, corpus: Dataset) -> None:
    """Prints a line with the run's parameters, devices, tokens per step, and needed and free memory per device (GiB). A
    second line names the text and how often it is read; for a mixture it gives each corpus's share of the rows instead.
    Where rows hold whole documents, a third says how much is padding and how much is cut off. Then it names each option
    that was given and has no effect."""
    config, mesh = blueprint.config, blueprint.mesh
    count, trained = sum(p.size for p in jax.tree.leaves(blueprint.parameters)), count_trained(blueprint.parameters)
    parameters = f"{count:,} parameters" + (f", {trained:,} of them trained," if trained < count else "")
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}{f' ({axes})' if axes else ''}"
    tokens = config.train.batch * config.model.context
    free = available_bytes(mesh)
    memory = f"at least {least_bytes(blueprint) / GIB:.2f} GiB a device" + (f", {free / GIB:.2f} free" if free else "")
    say(f"{title}: {parameters} on {devices}; {tokens:,} tokens a step; {memory}; compiling")
    context, rows = config.model.context, config.train.steps * config.train.batch
    corpora = [("the corpus", 1.0, corpus)]
    if isinstance(corpus, Mixture):
        corpora = list(zip(corpus.names, corpus.shares, corpus.corpora, strict=True))
        told = (f"{name} {share:.1%} ({_times(share * rows / one.rows(context))})" for name, share, one in corpora)
        say(f"of the rows: {', '.join(told)}")
    else:
        say(f"text: {config.data.path}, {corpus.token_count:,} tokens, read {_times(rows / corpus.rows(context))}")
    if config.data.rows != "packed":
        waste = [(name, *one.waste(context)) for name, _, one in corpora]
        told = (f"{padding:.1%} of {name} is padding, {cut:.1%} of its tokens cut off" for name, padding, cut in waste)
        say(f"{'a document a row' if config.data.rows == 'document' else 'whole documents'}: {'; '.join(told)}")
    for option, why in unused(blueprint).items():
        note(f"nagjax: --{option.replace('_', '-')} has no effect: {why}")


def _times(count: float) -> str:
    return f"{count:.2g} times" if count < 99.5 else f"{count:,.0f} times"


def check_memory(blueprint: Blueprint) -> None:
    """Raises UserError if a device has less free memory than `least_bytes`."""
    needed, free = least_bytes(blueprint), available_bytes(blueprint.mesh)
    if free is not None and needed > free:
        fix = (
            f"the run needs at least this on each device, where {free / GIB:.2f} GiB are free: make the model or the "
            "batch smaller, process the batch in parts (--accumulate), split the model (--mesh.fsdp), or use --force"
        )
        raise UserError("memory", f"{needed / GIB:.2f} GiB", fix)


def least_bytes(blueprint: Blueprint) -> int:
    """A lower bound, in bytes, of the memory that a training step needs on one device. It counts in float32 the
    parameters, their average if one is kept, the gradients and moments of the trained parameters, and the logits held
    at once (`nagjax.train.head_loss`); and in its own dtype each block's residual stream kept for the backward pass.
    Other activations come on top."""
    config, mesh = blueprint.config, blueprint.mesh
    model, train = config.model, config.train
    held = lambda p: math.prod(parameter_sharding(mesh, p.axes, p.shape).shard_shape(p.shape))  # noqa: E731
    leaves = jax.tree.leaves(blueprint.parameters)
    moments = 2 if config.optimizer.optimizer == "adamw" else 1
    state = 4 * (1 + bool(train.ema)) * sum(map(held, leaves))
    state += 4 * (1 + moments) * sum(held(p) for p in leaves if p.trained)
    rows = train.batch // train.accumulate // batch_parts(mesh.shape)
    tokens = rows * model.context // mesh.shape["sequence"]
    kept = 0 if model.remat == "offload" else model.depth * model.width * model.stream_dtype.itemsize
    parts = mesh.shape["tensor"]
    at_once = train.loss_chunk or chunk_tokens(tokens, model.vocab if model.vocab % parts else model.vocab // parts)
    logits = tokens if model.head_epsilon is not None else even_parts(tokens, at_once)[1]
    return state + tokens * kept + logits * (model.vocab // parts) * 4


def available_bytes(mesh: jax.sharding.Mesh) -> int | None:
    """Free memory in bytes of this process's device that has the least; None if unknown. CPU devices share the
    machine's memory equally."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        free = host_bytes()
        return None if free is None else free // len(local)
    found = [stats for device in local if (stats := device.memory_stats()) and "bytes_limit" in stats]
    return min((stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in found), default=None)


def host_bytes() -> int | None:
    """Free memory in bytes of the machine, or of this process's container if that has less; None if unknown."""
    found = []
    for line in _text(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found.append(1024 * int(value.split()[0]))
    limit, used = _text(CGROUP / "memory.max").strip(), _text(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        stat = dict(line.split() for line in _text(CGROUP / "memory.stat").splitlines())
        cache = int(stat.get("inactive_file", 0))  # page cache, which the system frees when memory is needed
        found.append(max(int(limit) - int(used) + cache, 0))
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
