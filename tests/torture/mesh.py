"""The same run over other devices, whose sums have another order."""

ROUNDING = 1e-3  # relative, after all steps
ROUTED = 2e-2  # the same with Mixture-of-Depths, where a rounding may let another token in


def two_devices() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 2)


def other_losses(history, records: list[dict], wanted: list[dict]) -> str:
    """How the losses of a run differ from those of another by more than rounding; nothing if they do not."""
    ours, theirs = losses(records), losses(wanted)
    limit = ROUTED if "--mod.rate" in history.variant.options else ROUNDING
    if ours.keys() != theirs.keys():
        return f"losses at {sorted(ours.keys() ^ theirs.keys())} are of one run alone"
    apart = {at: abs(ours[at] / theirs[at] - 1) for at in ours}
    worst = max(apart, key=apart.get)
    return f"the loss at {worst} is {ours[worst]}, not {theirs[worst]}" if apart[worst] > limit else ""


def losses(records: list[dict]) -> dict[tuple, float]:
    """Losses of every good step and evaluation."""
    kept = [record for record in records if "loss" in record and not record.get("skipped")]
    return {(record["kind"], record["step"]): record["loss"] for record in kept}
