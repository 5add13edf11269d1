"""The page of docs that a torture run writes."""

from tests.torture.faults import KINDS

HEAD = """# Faults injected, and what was lost

Written by `tests/torture` (`make torture`), which may add up several of its runs; do not edit.

{total} faults were injected into {runs} runs of `nagjax train` ({processes}
processes) on {cpus} CPUs, in {minutes:.0f} minutes beside other work (seed {seed}, {date}, jax {jax},
orbax-checkpoint {orbax}, commit {commit}).

Each configuration was trained once without faults. In the runs with faults, the same command was started again after
each fault, until the run was finished. Then the state (parameters, optimizer, routing thresholds, guards) and the
metrics file (apart from wall-clock fields and event lines) must equal those of the unbroken run bit for bit. *Lost*
counts the faults after which anything was different, the exit code was wrong, or a damaged checkpoint was not refused
by name. Two hosts are two processes with the parameters spread over both. When one has died, the other is given 5
seconds to end by itself, as a launcher does, and both are started again. Without faults, the losses of two hosts equal
those of one process within 0.1% at every step, or within 2% with Mixture-of-Depths (MoD), where a rounding may let
another token in.

| fault | what | injected | lost |
|---|---|---:|---:|
"""


def page(result: dict) -> str:
    """Markdown of a torture run's result."""
    total = sum(result["injected"].values())
    text = HEAD.format(
        total=total,
        runs=result["runs_finished"],
        processes=result["processes"],
        minutes=result["seconds"] / 60,
        cpus=result["cpus"],
        commit=result["commit"] or "unknown",
        seed=result["seed"],
        date=result["date"],
        jax=result["versions"]["jax"],
        orbax=result["versions"]["orbax-checkpoint"],
    )
    lost_total = 0
    for name, kind in KINDS.items():
        lost = sum(f"({name})" in problem for problem in result["problems"])
        lost_total += lost
        injected = result["injected"].get(name, 0)
        verdict = (lost or "nothing") if injected else "not tried"
        text += f"| {name} | {kind.what} | {injected} | {verdict} |\n"
    text += f"| all | | {total} | {lost_total or 'nothing'} |\n\n"
    stop = result["longest_stop_seconds"]
    text += f"From SIGTERM to the exit with everything saved it took {stop:.2f} s at most.\n\nConfigurations: "
    text += "; ".join(f"{name} ({count} faults)" for name, count in sorted(result["variants"].items())) + ".\n"
    return text
