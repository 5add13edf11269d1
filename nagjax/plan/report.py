"""Plans as text for the console."""

from nagjax.plan.units import gigabytes, milliseconds, scaled


def report(result: dict) -> str:
    """The plan as lines of text."""
    memory, mesh, choices = result["memory"], result["mesh"], result["choices"]
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one chip"
    lines = [
        f"{result['topology']}: {result['chips']} x {result['chip']['name']}, {shape}",
        f"  nagjax train {result['options']}",
        f"  {result['parameters']:,} parameters{_trained(result)}{_executed(result)}, "
        f"{result['tokens_per_step']:,} tokens a step; "
        f"{choices['dtype']}, attention {choices['attention']}, {_kernels(result)}",
        *(f"  note: {note}" for note in choices["notes"]),
        "",
        "memory of each device",
        *_rows(_memory(memory)),
    ]
    if "bound" in result:
        lines += ["", "one step of each device", *_rows(_step(result)), "", "at the bound", *_rows(_rate(result))]
    if "bill" in result:
        lines += ["", f"a training of {result['bill']['tokens']:,.0f} tokens", *_rows(_bill(result))]
    if result.get("involuntary_rematerializations"):
        lines.append(f"  warning: {result['involuntary_rematerializations']} arrays are gathered whole to be resharded")
    if result["fits"]:
        lines += ["", "It fits."]
    else:
        lines += ["", "It does not fit. What would help:", *(f"  {advice}" for advice in result["advice"])]
    took = result["seconds_to_compile"] + result["seconds_to_lower"]
    lines.append(f"Compiled in {took:.0f} s with {gigabytes(result['peak_rss'])} of memory, by jax {result['jax']}.")
    return "\n".join(lines)


def ranking(results: list[dict]) -> str:
    """Plans as a ranked list: first those that fit, by the bound of their step time per token, then those that do not
    fit."""
    lines = []
    for place, result in enumerate(sort(results), 1):
        if result.get("fits"):
            bound = result["bound"]
            lines.append(
                f"{place:3}. {milliseconds(bound['seconds']):>9} ({bound['limit']}), "
                f"{gigabytes(result['memory']['peak']):>10}: {result['options']}"
            )
        else:
            lines.append(f"   -  {result.get('error', 'does not fit'):>9}: {result['options']}")
    return "\n".join(lines)


def sort(results: list[dict]) -> list[dict]:
    """Sorts plans by the lower bound of step time per token; those that do not fit come last."""
    return sorted(
        results,
        key=lambda r: (not r.get("fits"), r["bound"]["seconds"] / r["tokens_per_step"] if r.get("fits") else 0.0),
    )


def _memory(memory: dict) -> dict[str, str]:
    state = ("parameters", "optimizer", "batch")
    rows = {name: gigabytes(memory[name]) for name in state}
    saved, workspace = "saved for the backward pass", "gradients and workspace"
    if "peak" in memory:
        rest = memory["peak"] - sum(memory[name] for name in state)
        if rest > memory["saved"]:
            rows |= {saved: gigabytes(memory["saved"]), workspace: gigabytes(rest - memory["saved"])}
        else:  # the compiler keeps less than tracing found
            rows[f"{saved}, {workspace}"] = gigabytes(rest)
        rows["peak"] = f"{gigabytes(memory['peak'])}, {memory['peak'] / memory['capacity']:.0%} of"
    else:
        rows[saved] = gigabytes(memory["saved"])
        if memory.get("needed"):
            rows["needed"] = f"{gigabytes(memory['needed'])}, by the compiler's refusal, of"
    return rows | {"capacity": gigabytes(memory["capacity"])}


def _step(result: dict) -> dict[str, str]:
    rows = {
        "matmuls": scaled(result["flops"], "FLOP"),
        "main memory": scaled(result["moved"], "B"),
        "arithmetic intensity": f"{result['intensity']:.0f} FLOP/B",
        "sent to others": scaled(result["sent"], "B"),
    }
    for kind, found in result["collectives"].items():
        rows[f"  {kind}"] = f"{found['count']} x, {scaled(found['sent'], 'B')}"
    return rows


def _rate(result: dict) -> dict[str, str]:
    bound, chip = result["bound"], result["chip"]
    rows = {
        "compute": f"{milliseconds(bound['compute'])} at {scaled(chip['flops'], 'FLOP/s')}",
        "memory": f"{milliseconds(bound['memory'])} at {scaled(chip['bandwidth'], 'B/s')}",
        "interconnect": f"{milliseconds(bound['interconnect'])} at {scaled(chip['egress'], 'B/s')}",
        "step, at least": f"{milliseconds(bound['seconds'])} ({bound['limit']} bound)",
        "tokens per second, at most": f"{scaled(result['tokens_per_second'])} "
        f"({scaled(result['tokens_per_second_per_chip'])} per chip)",
        "model FLOPs utilization, at most": f"{result['highest_mfu']:.0%}",
    }
    if result["dollars_per_billion_tokens"] is not None:
        price = f"{result['dollars_per_billion_tokens']:,.2f} $ at {result['dollars_per_hour']:g} $ per chip and hour"
        rows["a billion tokens, at least"] = price
    return rows | {"peaks from": chip["source"]}


def _bill(result: dict) -> dict[str, str]:
    bill, price = result["bill"], result["dollars_per_hour"]
    rows = {
        f"at {bill['mfu']:.0%} MFU (assumed)": _cost(bill["assumed"]),
        "at the bound, at least": _cost(bill["bound"]),
    }
    if price is None:
        return rows | {"price": "give --dollars-per-hour, of one chip"}
    return rows | {"price": f"{price:g} $ per chip and hour; start, evaluations and saves come on top"}


def _cost(cost: dict) -> str:
    dollars = "" if cost["dollars"] is None else f", {cost['dollars']:,.2f} $"
    return f"{_amount(cost['hours'])} hours, {_amount(cost['chip_hours'])} chip-hours{dollars}"


def _amount(value: float) -> str:
    """A number with three digits or more, so that printed numbers remain consistent with each other."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _trained(result: dict) -> str:
    trained = result.get("trained_parameters", result["parameters"])
    return f", {trained:,} of them trained" if trained < result["parameters"] else ""


def _executed(result: dict) -> str:
    executed = result.get("executed_parameters", result["parameters"])
    return f" ({executed:,.0f} executed for a token)" if executed < result["parameters"] else ""


def _kernels(result: dict) -> str:
    if "kernels" not in result:
        return "kernels not known"
    return "kernels " + (", ".join(f"{name} x{n}" for name, n in result["kernels"].items()) or "none (XLA's fusions)")


def _rows(rows: dict[str, str]) -> list[str]:
    return [f"  {name:30} {value}" for name, value in rows.items()]
