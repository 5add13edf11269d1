"""bench step | compile | mod: step times, compile times, and what skipping tokens saves."""

from pathlib import Path
from typing import Literal

from nagjax.arguments import Given
from nagjax.console import say
from nagjax.errors import renamed
from nagjax.files import check_writable_file
from nagjax.memory import keep_freed_memory
from nagjax.ranges import Count, Fraction


def step(
    schemes: tuple[str, ...] = ("plain", "lns", "review", "nag"),
    depth: Count = 24,
    width: Count = 256,
    batch: Count = 4,
    context: Count = 256,
    rounds: Count = 7,
    steps: Count = 2,
    out: Path | None = None,
) -> None:
    """Time whole training steps of several schemes against the first one.

    Args:
        schemes: schemes to time.
        depth: number of blocks.
        width: features of the residual stream.
        batch: sequences per step.
        context: tokens per sequence.
        rounds: each round times every scheme once, so that noise affects all of them.
        steps: consecutive steps per round.
        out: also write the result to this file, as JSON.
    """
    if out:
        check_writable_file(out)
    keep_freed_memory()
    from nagjax.measure.step_times import StepTimes, step_times

    bench = StepTimes(schemes, depth, width, batch, context, rounds, steps, out)
    say(f"timing steps of {', '.join(schemes)}: {depth} blocks x {width}, {batch} x {context} tokens; compiling")
    step_times(bench)


def compile(
    schemes: tuple[str, ...] = ("plain", "nag"),
    shallow: Count = 12,
    deep: Count = 96,
    width: Count = 64,
    batch: Count = 4,
    context: Count = 128,
    rounds: Count = 3,
    out: Path | None = None,
) -> None:
    """Time tracing and compiling one training step at two depths: scanned layers should make both take equally long.

    Args:
        schemes: schemes to time.
        shallow: blocks of the shallow model.
        deep: blocks of the deep model.
        width: features of the residual stream.
        batch: sequences per step.
        context: tokens per sequence.
        rounds: each round compiles everything once.
        out: also write the result to this file, as JSON.
    """
    if out:
        check_writable_file(out)
    from nagjax.measure.step_times import CompileTimes, compile_times

    bench = CompileTimes(schemes, shallow, deep, width, batch, context, rounds, out)
    say(f"timing the compilation of {', '.join(schemes)}: {shallow} and {deep} blocks x {width}")
    compile_times(bench)


def mod(
    phase: Literal["train", "prefill", "decode"] = "train",
    scheme: str = "nag",
    rate: Fraction = 0.5,
    router: str = "auto",
    kv: str = "all",
    depth: Count = 24,
    width: Count = 256,
    batch: Count = 1,
    context: Count = 1024,
    rounds: Count = 5,
    steps: Count | None = None,
    out: Path | None = None,
    *,
    given: Given,
) -> None:
    """Time a routed model against the dense one, and compare the time saved with the FLOPs saved.

    Args:
        phase: what to time. train: a training step; prefill: reading prompts that fill the context; decode: generating
            tokens after such prompts.
        scheme: the residual scheme.
        rate: share of the tokens that skip each sublayer.
        router: how these tokens are chosen, as --mod.router of nagjax train.
        kv: tokens whose keys and values attention sees, as --mod.kv of nagjax train.
        depth: number of blocks.
        width: features of the residual stream.
        batch: sequences per training step, or texts that are read or continued at once.
        context: tokens per sequence; for decode, tokens of each prompt.
        rounds: each round times both models once, so that noise affects both.
        steps: for train, consecutive steps per round, 1 by default; for decode, new tokens per text and round, 16 by
            default; not for prefill.
        out: also write the result to this file, as JSON.
    """
    if phase == "prefill":
        given.refuse(("steps",), "a round of --phase prefill reads every prompt once: leave it out")
    if out:
        check_writable_file(out)
    say(f"timing {phase}, routed and dense: {scheme}, {depth} blocks x {width}, {batch} x {context} tokens; compiling")
    keep_freed_memory()
    shape = (scheme, rate, router, kv, depth, width, batch, context, rounds)
    with renamed("mod.router", "router"), renamed("mod.kv", "kv"):
        if phase == "train":
            from nagjax.measure.routing_times import RoutingTimes, routing_times

            routing_times(RoutingTimes(*shape, steps or 1, out))
        else:
            from nagjax.measure.sampling_times import SamplingTimes, sampling_times

            sampling_times(SamplingTimes(*shape, steps or 16, out, phase))


SUBCOMMANDS = (step, compile, mod)
