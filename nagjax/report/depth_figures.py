"""The figures of a diagnosis, each with one message, in reading order."""

from collections.abc import Callable, Sequence

import numpy as np

from nagjax.report.depth_plots import ATTENTION, BLOCK, FIRST, MARK, MLP, QUIET, Grid, Line, Lines, draw
from nagjax.report.plots import Plot
from nagjax.report.verdict_depth import RISE, USED, ranges

LAST = "The last place is behind the last block."
Drawing = tuple[str, str, Lines | Grid]  # file stem, caption, figure
RULE_LOOKS = {"late": (BLOCK, "o"), "penultimate": (FIRST, "v")}
RULE_LOOKS |= {"influence": (ATTENTION, "s"), "angle": (MLP, "^"), "drop": (MARK, "D")}


def draw_diagnosis(record: dict) -> list[Plot]:
    """Every figure for which the record has data; values of None are left out of the figures."""
    drawings = [found for make in _FIGURES if (found := make(record)) is not None and _measured(found[2])]
    return [Plot(name, caption, draw(what)) for name, caption, what in drawings]


def _measured(what: Lines | Grid) -> bool:
    """Whether there is anything to draw."""
    if isinstance(what, Grid):
        shown = what.values if what.mask is None else what.values[~what.mask]
        return bool(np.any(np.isfinite(shown) & ((shown > 0) | (not what.log))))
    return any(y is not None and np.isfinite(y) for line in what.lines for y in line.y)


def _rest(values: Sequence[Sequence[float]], group: int = 0) -> list[float]:
    return [value[group] for value in values]


def _by_kind(values: Sequence[float]) -> list[Line]:
    """The lines of values by sublayer: one for attention's, and one for the MLPs'."""
    return [Line("attention", values[::2], ATTENTION), Line("MLP", values[1::2], MLP, "s")]


def _damage(record: dict) -> Drawing:
    skips = record["skips"]
    lost = [block for block, added in enumerate(skips["added_loss"]) if added is None]
    no_loss = f" To the top: block {ranges(lost)}, without which the loss is not finite." if lost else ""
    return (
        "damage",
        f"What leaving out each block alone adds to the validation loss. Blocks under the dashed line ({USED:g}) are "
        f"hardly used.{no_loss}",
        Lines(
            "What is lost without each block",
            "nats per token added by leaving out one block, no retraining",
            [Line("", skips["added_loss"], BLOCK)],
            level=(USED, f"{USED:g}"),
            bars=True,
            knee=USED,
        ),
    )


def _curve(record: dict) -> Drawing:
    curve = record["curve"]
    less = lambda loss: None if loss is None else loss - curve["loss"]  # noqa: E731
    lines = [
        Line(rule, [less(loss) for _, loss, _ in points], *RULE_LOOKS[rule], [n for n, _, _ in points])
        for rule, points in curve["rules"].items()
    ]
    broken = any(loss is None for points in curve["rules"].values() for _, loss, _ in points)
    ending = " Points without a finite loss are left out." if broken else ""
    return (
        "curve",
        "Loss added without blocks, no retraining, by the rule that chooses them: the deepest; these but the last; "
        "those of least influence; the run of neighbours that turns the residual least; those whose removal alone "
        "costs least." + ending,
        Lines(
            "How many blocks can go",
            "nats per token added to the validation loss",
            lines,
            bottom=0.0,
            xlabel="blocks left out",
            knee=RISE,
        ),
    )


def _effects(record: dict) -> Drawing:
    values = np.array(record["skips"]["effects"], float)
    depth, score = len(values), record["skips"]["depth_score"]
    return (
        "effects",
        "Largest relative change, over tokens, of a later block's update when an earlier block is skipped (Csordas et "
        f"al. 2025). Depth score {score if score is not None else 'n/m'}; {depth / 2:g} where all depths matter alike.",
        Grid(
            "Which later blocks build on which earlier ones",
            "largest relative change of a block's update when an earlier one is skipped",
            values,
            "change of the update / its length (log scale)",
            "later block",
            "block left out",
            log=True,
            mask=np.tril(np.ones((depth, depth), bool)),
        ),
    )


def _apart(name: str, caption: str, title: str, axis: str, values: Sequence, first: float) -> Drawing:
    """A figure of other tokens and of first tokens by sublayer, on a log scale; the first value is drawn at block
    `first`."""
    places = first + np.arange(len(values)) / 2
    lines = [
        Line("other tokens", _rest(values), BLOCK, "o", places),
        Line("first tokens", _rest(values, 1), FIRST, "s", places),
    ]
    return name, caption, Lines(title, axis, lines, log=True)


def _norm(record: dict) -> Drawing:
    return _apart(
        "norm",
        "Mean length of the residual in front of each sublayer, first tokens of rows and documents apart.",
        "How long the residual grows",
        "mean length of the residual, log scale",
        record["sublayers"]["norm"],
        first=1.0,
    )


def _contribution(record: dict) -> Drawing:
    values = _rest(record["sublayers"]["contribution"])
    return (
        "contribution",
        "Length of what each sublayer writes over the length of the residual it is written on.",
        Lines(
            "How much each sublayer writes",
            "length of the update / length of the residual, log scale",
            _by_kind(values),
            log=True,
        ),
    )


def _cosine(record: dict) -> Drawing:
    values = _rest(record["sublayers"]["cosine"])
    return (
        "cosine",
        "Cosine between what a sublayer writes and the residual it finds: below 0 it erases, near 0 it writes "
        "something new, above 0 it amplifies.",
        Lines(
            "Does it write something new?",
            "cosine of update and residual",
            _by_kind(values),
            level=(0.0, "new"),
            span=0.2,
        ),
    )


def _turn(record: dict) -> Drawing:
    values = np.degrees(np.array(_rest(record["sublayers"]["turn"]), float))
    return (
        "turn",
        "Mean angle by which each sublayer turns the residual.",
        Lines(
            "How far each sublayer turns the residual",
            "degrees, log scale",
            _by_kind(values),
            log=True,
        ),
    )


def _successive(record: dict) -> Drawing:
    return (
        "successive",
        "Angle between the updates of neighbouring blocks: 90 degrees where they write independently of each other "
        "(ensemble), small where they take steps of one smooth flow.",
        Lines(
            "Do neighbouring blocks go the same way?",
            "angle between the updates of a block and the next, degrees",
            [Line("this model", np.degrees(np.array(record["successive_update_angle"], float)), BLOCK)],
            level=(90.0, "independent"),
        ),
    )


def _distance(record: dict) -> Drawing:
    return (
        "distance",
        f"Mean angle over pi between the residuals in front of any two blocks (Gromov et al. 2024). {LAST}",
        Grid(
            "How far apart depths are",
            "mean angle between residuals, as a share of 180 degrees",
            np.array(record["angular_distance"], float),
            "angle / 180 degrees",
            "in front of block",
            "in front of block",
        ),
    )


def _cka(record: dict) -> Drawing:
    return (
        "cka",
        "Linear CKA between the residuals in front of any two blocks, debiased for the number of tokens (at least 4): "
        f"1 where they are alike up to a rotation, about 0 or slightly below where they are unrelated. {LAST}",
        Grid(
            "How alike depths represent their tokens",
            "debiased linear CKA of the residual",
            np.array(record["cka"], float),
            "CKA",
            "in front of block",
            "in front of block",
            top=1.0,
        ),
    )


def _lens(record: dict) -> Drawing:
    return (
        "lens",
        "Divergence from the model's own prediction of what the head would say if it read the residual in front of "
        f"each block (logit lens). {LAST}",
        Lines(
            "When the prediction is there",
            "KL divergence from the model's prediction, nats",
            [Line("read at this depth", record["lens"]["divergence"], BLOCK)],
            bottom=0.0,
        ),
    )


def _ranks(record: dict) -> Drawing:
    return (
        "ranks",
        "Effective rank (exponential of the singular values' entropy) and stable rank of the residuals of "
        f"{record['sampled']} sampled tokens, in front of each block. {LAST}",
        Lines(
            "In how many directions tokens spread",
            f"rank of the residual, of at most {min(record['width'], record['sampled'])}, log scale",
            [
                Line("effective rank", record["effective_rank"], ATTENTION),
                Line("stable rank", record["stable_rank"], MLP, "s"),
            ],
            log=True,
        ),
    )


def _outliers(record: dict) -> Drawing:
    return _apart(
        "outliers",
        "Largest over median feature of the residual behind each sublayer, mean over tokens, first tokens of rows and "
        "documents apart.",
        "How far the largest feature sticks out",
        "max |h| / median |h|, mean over tokens, log scale",
        record["sublayers"]["massive"],
        first=1.5,
    )


def _sinks(record: dict) -> Drawing:
    return (
        "sinks",
        "Share of its attention a block gives to the first token of a row or, in packed rows, of a document, and share "
        "of its heads that give more than 0.3 to it. Uniform attention gives it the mean of 1/position.",
        Lines(
            "Attention sinks",
            "share of attention on first tokens, and of heads above 0.3",
            [
                Line("attention", record["attention"]["first"], ATTENTION),
                Line("sink heads", record["attention"]["sinks"], MLP, "s"),
            ],
            bottom=0.0,
        ),
    )


def _jacobian(record: dict) -> Drawing | None:
    if record["blocks"]["jacobian"] is None:
        return None
    return (
        "jacobian",
        "Distance of each block's Jacobian to the identity, ||J - I||_F / sqrt(D), estimated with random vectors.",
        Lines(
            "How far each block is from doing nothing",
            "||J - I|| / sqrt(D), log scale",
            [Line("block", record["blocks"]["jacobian"], BLOCK)],
            log=True,
        ),
    )


def _gradients(record: dict) -> Drawing:
    found, residual = record["gradients"], record["gradients"]["residual"]
    relative = lambda values: np.array(values, float) / np.mean([v for v in values if v is not None] or 1.0)  # noqa: E731
    lines = [Line("parameters", relative(found["parameters"]), ATTENTION)]
    lines += [] if residual is None else [Line("residual", relative(residual), MLP, "s")]
    to_residual = "" if residual is None else ", and to the residual in front of it, each"
    return (
        "gradients",
        f"Norm of the loss' gradient with respect to each block's parameters{to_residual} over its mean over depth.",
        Lines(
            "Where the gradient goes",
            "norm of the gradient / its mean over depth, log scale",
            lines,
            log=True,
        ),
    )


def _gates(record: dict) -> Drawing | None:
    if record["gates"] is None:
        return None
    turn = record["gates"]["turn"]
    return (
        "gates",
        "NAG's modulators: mean |t|, the tangent of the angle by which the sublayer turns the residual.",
        Lines(
            "How far NAG's modulators let sublayers turn",
            "mean |t| by sublayer",
            _by_kind(turn),
            level=(0.05, "0.05"),
            bottom=0.0,
        ),
    )


def _calibration(record: dict) -> Drawing:
    sure, right = (100 * np.array(part) for part in list(zip(*record["calibration"]["bins"], strict=True))[1:])
    return (
        "calibration",
        "Share of right predictions against the probability the model gives to them, in 15 bins of equal width (Guo et "
        f"al. 2017). Expected calibration error {record['calibration']['error']:.3f}.",
        Lines(
            "Is it right as often as it says?",
            "right predictions, %",
            [Line("as often as it says", (0, 100), QUIET, "", (0, 100)), Line("this model", right, BLOCK, "o", sure)],
            bottom=0.0,
            xlabel="probability of the predicted token, %",
        ),
    )


_FIGURES: tuple[Callable[[dict], Drawing | None], ...] = (
    _damage,
    _curve,
    _effects,
    _norm,
    _contribution,
    _cosine,
    _turn,
    _successive,
    _distance,
    _cka,
    _lens,
    _ranks,
    _outliers,
    _sinks,
    _jacobian,
    _gradients,
    _gates,
    _calibration,
)
