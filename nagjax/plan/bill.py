"""The time and cost of a training on a machine: at the lower bound of its step time, and at an assumed share of the
peak."""

ASSUMED_MFU = 0.3


def bill(planned: dict, tokens: float, mfu: float = ASSUMED_MFU) -> dict:
    """The cost of `tokens` training tokens, for a plan that fits: `bound`, if every step took the lower bound of its
    time, and `assumed`, at the model FLOPs utilization `mfu`, or at the highest possible one if that is lower. Each has
    `hours`, `chip_hours` and `dollars` (None if the plan has no price per chip and hour). Start-up, evaluations, saves
    and idle time are not included."""
    peak = planned["chips"] * planned["chip"]["flops"]
    least = tokens / planned["tokens_per_second"]
    assumed = max(tokens * planned["model_flops_per_token"] / (mfu * peak), least)
    seconds = {"bound": least, "assumed": assumed}
    return {"tokens": tokens, "mfu": min(mfu, planned["highest_mfu"])} | {
        name: _cost(own / 3600, planned["chips"], planned["dollars_per_hour"]) for name, own in seconds.items()
    }


def _cost(hours: float, chips: int, dollars_per_hour: float | None) -> dict:
    dollars = None if dollars_per_hour is None else hours * chips * dollars_per_hour
    return {"hours": hours, "chip_hours": hours * chips, "dollars": dollars}
