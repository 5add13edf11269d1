"""What a training takes and costs on a machine: at the bound of its step, and at an assumed share of the peak."""

ASSUMED_MFU = 0.3


def bill(planned: dict, tokens: float, mfu: float = ASSUMED_MFU) -> dict:
    """Of a plan that fits, for so many training tokens: `bound`, if every step took the least it can, and `assumed`, at
    this model FLOPs utilization or the highest one possible. Each has `hours`, `chip_hours` and, where the plan has a
    price per chip and hour, `dollars`. Start, evaluations, saves and idle time are not in it."""
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
