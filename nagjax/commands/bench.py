"""bench step | compile | mod: step times, compile times, and what skipping tokens saves."""

from pathlib import Path

from nagjax.console import say
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
        depth: blocks.
        width: features of the residual.
        batch: sequences per step.
        context: tokens of a sequence.
        rounds: each round times every scheme once, so that noise affects all of them.
        steps: steps in a row per round.
        out: also write the result to this file, as JSON.
    """
    say(f"timing steps of {', '.join(schemes)}: {depth} blocks x {width}, {batch} x {context} tokens; compiling")
    keep_freed_memory()
    from nagjax.measure.step_times import StepTimes, step_times

    step_times(StepTimes(schemes, depth, width, batch, context, rounds, steps, out))


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
        width: features of the residual.
        batch: sequences per step.
        context: tokens of a sequence.
        rounds: each round compiles everything once.
        out: also write the result to this file, as JSON.
    """
    say(f"timing the compilation of {', '.join(schemes)}: {shallow} and {deep} blocks x {width}")
    from nagjax.measure.step_times import CompileTimes, compile_times

    compile_times(CompileTimes(schemes, shallow, deep, width, batch, context, rounds, out))


def mod(
    scheme: str = "nag",
    rate: Fraction = 0.5,
    router: str = "auto",
    kv: str = "all",
    depth: Count = 24,
    width: Count = 256,
    batch: Count = 1,
    context: Count = 1024,
    rounds: Count = 5,
    steps: Count = 1,
    out: Path | None = None,
) -> None:
    """Time a routed training step against the dense one, and compare the time saved with the FLOPs saved.

    Args:
        scheme: the residual scheme.
        rate: share of the tokens that skip each sublayer.
        router: what chooses them, as --mod.router of nagjax train.
        kv: tokens whose keys and values attention sees, as --mod.kv of nagjax train.
        depth: blocks.
        width: features of the residual.
        batch: sequences per step.
        context: tokens of a sequence.
        rounds: each round times both steps once, so that noise affects both.
        steps: steps in a row per round.
        out: also write the result to this file, as JSON.
    """
    say(f"timing routed and dense steps of {scheme}: {depth} blocks x {width}, {batch} x {context} tokens; compiling")
    keep_freed_memory()
    from nagjax.measure.routing_times import RoutingTimes, routing_times

    routing_times(RoutingTimes(scheme, rate, router, kv, depth, width, batch, context, rounds, steps, out))


SUBCOMMANDS = (step, compile, mod)
