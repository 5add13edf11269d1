"""States the result of a diagnosis in words: how much of the depth is used, and which blocks could be removed."""

import math

from nagjax.report.labels import listing

USED = 0.01  # nats per token that leaving out a block must add for it to count as used
RISE = 0.02  # nats per token that removing several blocks may add


def depth_verdict(record: dict) -> str:
    """A few sentences on the record of `diagnose`."""
    parts = [_used(record), _score(record), _removable(record), *_gates(record), *_held(record), _sure(record)]
    return " ".join(parts)


def used_blocks(record: dict) -> int:
    """The number of blocks whose absence alone adds at least `USED` nats per token, or makes the loss infinite."""
    return sum(added >= USED for added in _added(record))


def _added(record: dict) -> list[float]:
    """The loss that leaving out each block adds; infinite if the loss is then not finite."""
    return [math.inf if added is None else added for added in record["skips"]["added_loss"]]


def removable(record: dict, rise: float = RISE) -> tuple[str, list[int], float]:
    """The largest set of blocks on the pruning curves that adds at most `rise` nats per token: its rule, blocks and
    added loss. Of equally large sets, the one that adds least."""
    whole = record["curve"]["loss"]
    sets = [
        (len(gone), whole - loss, rule, gone)
        for rule, points in record["curve"]["rules"].items()
        for _, loss, gone in points
        if loss is not None and loss - whole <= rise
    ]
    _, gain, rule, gone = max(sets, key=lambda found: found[:2])
    return rule, gone, -gain


def ranges(blocks: list[int]) -> str:
    """Blocks (indices from 0) in words, counted from 1 as `nagjax prune` does, with neighbours joined: 4, 6-10."""
    runs: list[list[int]] = []
    for block in (index + 1 for index in sorted(blocks)):
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return listing([str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs])


def surely_used_blocks(record: dict) -> int:
    """The number of blocks that add more than USED by over two standard errors; without standard errors, that add more
    than USED."""
    errors = record["skips"]["standard_error"] or [0.0] * record["depth"]
    return sum(added - USED > 2 * (error or 0.0) for added, error in zip(_added(record), errors, strict=True))


def _used(record: dict) -> str:
    used, depth, skips = used_blocks(record), record["depth"], record["skips"]
    told = ""
    if skips["standard_error"] is not None:
        sure, over = surely_used_blocks(record), f"over {skips['batches']} batches"
        told = f" ({sure} of them more than two standard errors above this, {over})"
    costliest = max(range(depth), key=_added(record).__getitem__)
    return (
        f"{used} of {depth} blocks ({used / depth:.0%}) are used: leaving out one of them alone adds at least {USED:g} "
        f"nats per token to a loss of {skips['loss']:.3f}{told}. The effective number of blocks, the participation "
        f"ratio of the added losses, is {skips['contributing']:.1f}; the most costly is block "
        f"{costliest + 1} (+{_added(record)[costliest]:.2f})."
    )


def _score(record: dict) -> str:
    score, even = record["skips"]["depth_score"], record["depth"] / 2
    if score is None and any(effect is None for row in record["skips"]["effects"] for effect in row):
        return "Which blocks later ones build on could not be measured: not every effect of a block is finite."
    if score is None:
        return "No block has an effect on a later one."
    side = "shallow" if score < 0.9 * even else "deep" if score > 1.1 * even else "all"
    return (
        f"Depth score {score:.1f} ({even:g} would be even): later blocks build "
        + {"shallow": "mostly on shallow ones.", "deep": "mostly on deep ones.", "all": "on all depths alike."}[side]
    )


def _removable(record: dict) -> str:
    rule, gone, cost = removable(record)
    if not gone:
        fewest = min(points[1][0] for points in record["curve"]["rules"].values() if len(points) > 1)
        return f"No rule finds even {_together(fewest)} for {RISE:g} nats per token."
    return f"Found: {_together(len(gone))} for {cost:+.3f} nats per token: {ranges(gone)} (rule {rule!r})."


def _together(count: int) -> str:
    return "1 block that could go" if count == 1 else f"{count} blocks that could go together"


def _gates(record: dict) -> list[str]:
    if record["gates"] is None:
        return []
    dead, all_of = sum(record["gates"]["dead"]), len(record["gates"]["dead"])
    turned = "let their sublayer turn the residual by less than 3 degrees (mean tangent below 0.05)"
    return [f"{dead:.0f} of {all_of} modulators {turned}."]


def _held(record: dict) -> list[str]:
    if record["held_gates"] is None:
        return []
    found = record["held_gates"]["mean"]
    if found["added_loss"] is None:
        return ["Gates held at their mean, whatever the token, leave no finite loss."]
    error = "" if found["standard_error"] is None else f", standard error {found['standard_error']:.3f}"
    return [f"Gates held at their mean, whatever the token, add {found['added_loss']:.3f} nats per token{error}."]


def confidence_and_accuracy(record: dict) -> tuple[float, float]:
    """Mean confidence and share of right predictions, over all tokens that count."""
    parts = record["calibration"]["bins"]
    return sum(share * sure for share, sure, _ in parts), sum(share * right for share, _, right in parts)


def _sure(record: dict) -> str:
    sure, right = confidence_and_accuracy(record)
    return (
        f"It is right on {right:.1%} of the tokens, and the probabilities of its guesses are {sure:.1%} on average: "
        f"{'over' if sure > right else 'under'}confident, with an expected calibration error of "
        f"{record['calibration']['error']:.3f}."
    )
