"""Causal tracing inside language models: do early blocks work on the subject, and late ones on the last token?

Claim: Restoring the subject matters in early blocks, the last token in late ones: blocks form groups by function.
Source: Liu, Kangaslahti, Liu & Gore 2026, arXiv:2602.05970, Figure 6 (Pythia 70m to 12b), by the method of Meng et al.
  2022, arXiv:2202.05262 (ROME), Section 2
Expected: the indirect effect of the subject's last token falls with depth and that of the prompt's last token rises (no
  figures published)
Hardware: smoke and cpu: 2 CPU cores; models: 2 CPU cores
Time: smoke 15 s; models 5 min; cpu not measured
Command: python -m experiments.causal_trace --size models
Known: models: a look at the same text and models (without nag_harmonic-24, which was trained later) with 8 windows of a
  document, which gave 12 to 16 prompts; 64 windows and 24 prompts were chosen after that look

Noise of three times the standard deviation of the embedding is added to the embeddings of the subject's tokens, which
makes the answer less likely. The indirect effect of a token in front of a block is how much likelier the answer becomes
again when the token's residual from the run without noise is put back there.

Prompts are found in held-out text, by one rule for every model. A window lies inside a document; the model gives its
next token, the answer, a probability p of at least `sure`; and the same token stands once in the window, `gap` tokens
or more from its end. The subject is that earlier token with the one in front of it: what there is to copy. The first
windows in which the noise lowers p by at least `drop` are kept, one of a document; the result tells how many were read
and traced. So this measures copying from context. The paper's prompt asks for a fact, and models of this size know
none.

The rule was set before anything was measured. Over prompts, two differences must be above 0: the effect of the
subject's last token, mean over the first half of the depths minus that over the second, and the effect of the prompt's
last token, second half minus first. A part of this holds by construction: behind the last block only the last token is
read, so there the effect of the subject is 0 and that of the last token is all that the noise took. `handover` says
where the two effects cross. Models given with `--runs` are one seed of each scheme, which decides nothing. Models
trained here have their schemes' default rates, which decides nothing either; their intervals are over seeds.

`--runs FOLDER ...` looks at given models: runs, or what `nagjax import` reads. `--prompt` with `--subject` and
`--answer` traces a prompt of one's own at every token, here the paper's on an imported Pythia:

    python -m experiments.causal_trace --size models --results OUT --runs FOLDER \
      --prompt "The space needle is in downtown" --subject "space needle" --answer " Seattle"

From Python: `nagjax.measure.causal_trace.trace_text(nagjax.load(FOLDER), PROMPT, SUBJECT, ANSWER)`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.figures import look, panels
from experiments.harness.jobs import Record, Training, looked_at, seeded
from experiments.harness.looks import MODELS, Look, looks, named_corpus, rounded
from experiments.harness.results import Summary
from experiments.harness.statistics import Interval, mean_interval
from experiments.harness.verdicts import few, signed, within
from nagjax.data import DataConfig, Dataset
from nagjax.data.pipeline import STDLIB
from nagjax.errors import UserError
from nagjax.generate.evaluate import run_text
from nagjax.interop.load import load
from nagjax.measure.causal_trace import handover, last_logits, trace, trace_text
from nagjax.measure.cuts import forward_options
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, Natural, Positive
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig
from nagjax.runs.opening import OpenRun

SCHEMES = ("plain", "lns", "nag")
READ = 64  # windows read at once
ALONE = "one model of each scheme, one seed: intervals are over its prompts"


@dataclasses.dataclass(frozen=True)
class Settings:
    depth: Count
    width: Count
    context: Count
    batch: Count
    steps: Count
    seeds: Natural
    schemes: tuple[str, ...] = SCHEMES
    prompts: Count = 24  # of each model, at most
    each: Count = 64  # windows of a document that are read, at most
    window: Count = 48  # tokens of a prompt
    gap: Natural = 8  # tokens from the subject's last one to the prompt's end, at least
    sure: float = 0.5  # p of the answer, at least
    drop: float = 0.2  # what the noise takes off it, at least
    noise: Positive = 3.0  # standard deviations of the embedding
    draws: Count = 10  # of the noise
    runs: tuple[str, ...] = ()  # models to look at instead of training any
    data: str = STDLIB  # or a folder made by nagjax data prepare; for `runs` their own corpus unless it is a folder
    prompt: str = ""  # to trace instead of prompts from the text, in the models of `runs`
    subject: str = ""  # a part of it
    answer: str = ""  # what follows it; "": what the model finds likeliest


SIZES = {
    "smoke": Settings(3, 16, 16, 8, 2, 1, ("nag",), 2, window=12, gap=4, sure=0.0, drop=-1.0, draws=2),
    "cpu": Settings(12, 64, 64, 8, 1000, 3),
    "models": Settings(24, 64, 256, 4, 20_000, 1, runs=MODELS),
}


@dataclasses.dataclass(frozen=True)
class Search:
    """For prompts, and how they are traced; as what is measured of a run that was trained."""

    prompts: int
    each: int
    window: int
    gap: int
    sure: float
    drop: float
    noise: float
    draws: int

    @classmethod
    def of(cls, settings: Settings) -> "Search":
        return cls(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)})

    def __call__(self, folder: Path) -> dict:
        run = load(folder)
        return searched(run, run_text(run), self)


def plan(settings: Settings) -> list[Training | Look]:
    if settings.prompt and not settings.runs:
        raise UserError("prompt", settings.prompt, "name the models that are to read it with --runs")
    search = Search.of(settings)
    if settings.runs:
        own = {name: getattr(settings, name) for name in ("data", "prompt", "subject", "answer")}
        return looks(settings.runs, dataclasses.asdict(search) | own, functools.partial(_given, settings))
    return [
        Training(f"{s}-s{seed}", {"scheme": s, "seed": seed}, seeded(_config(settings, s), seed), search)
        for seed in range(settings.seeds)
        for s in settings.schemes
    ]


def _config(settings: Settings, scheme: str) -> RunConfig:
    model = ModelConfig(depth=settings.depth, width=settings.width, context=settings.context)
    train = looked_at(settings.steps, settings.batch, 4, times=1)
    return RunConfig(find_scheme(scheme)(), model, train=train, data=DataConfig(path=settings.data))


def _given(settings: Settings, run: OpenRun) -> dict:
    """What is measured of a model that is there already."""
    if settings.prompt:
        return _facts(run) | {"prompts": [_asked(run, settings)]}
    return searched(run, run_text(run, named_corpus(settings.data)), Search.of(settings))


def _facts(run: OpenRun) -> dict:
    return {"scheme": run.config.scheme.name, "depth": run.config.model.depth}


def _asked(run: OpenRun, own: Settings) -> dict:
    """The prompt of the settings, traced at every token."""
    found = trace_text(run, own.prompt, own.subject, own.answer or None, noise=own.noise, draws=own.draws)
    return _told(run, found) | {"tokens": found.tokens, "effect": rounded(found.effect, 5)}


def searched(run: OpenRun, text: Dataset, search: Search) -> dict:
    """`prompts`, each with p of its answer and the effects at two tokens [2, L+1]; and how many windows of the text
    were `read`, in how many of these the model was `certain`, and how many were `noised`."""
    counts = {"read": 0, "certain": 0, "noised": 0}
    kept: dict[int, dict] = {}
    for part in itertools.batched(windows(text, search), READ):
        if len(kept) == search.prompts:
            break
        p = _next(run, np.stack([window for _, window, _, _ in part]), np.array([one[2] for one in part]))
        counts["read"] += len(part)
        for (document, window, answer, place), own in zip(part, p, strict=True):
            counts["certain"] += bool(own >= search.sure)
            if own < search.sure or document in kept or len(kept) == search.prompts:
                continue
            traced = functools.partial(
                trace, run, window, (place - 1, place + 1), answer, noise=search.noise, draws=search.draws
            )
            noised = traced(places=())
            counts["noised"] += 1
            if noised.clean - noised.corrupted >= search.drop:
                kept[document] = _told(run, traced(places=(place, search.window - 1)))
                kept[document] |= {"subject": run.tokenizer.decode(window[place - 1 : place + 1])}
    return _facts(run) | counts | {"prompts": list(kept.values())}


Window = tuple[int, Int[np.ndarray, " T"], int, int]  # document, tokens, the next one, and where that stands in them


def windows(text: Dataset, search: Search) -> Iterator[Window]:
    """Windows of held-out documents whose next token stands in them once, not in the first place and at least `gap`
    from the end; documents in an order drawn by seed 0, of each a few windows, drawn, too."""
    random = np.random.default_rng(0)
    for document in random.permutation(text.stream.document_count).tolist():
        tokens = text.stream.read(*text.stream.document(document))
        found = 0
        for at in random.permutation(np.arange(search.window, len(tokens))).tolist():
            window, following = tokens[at - search.window : at], int(tokens[at])
            places = np.flatnonzero(window == following)
            if len(places) == 1 and 1 <= places[0] <= search.window - search.gap:
                yield document, window, following, int(places[0])
                found += 1
            if found == search.each:
                break


def _next(run: OpenRun, windows: Int[np.ndarray, "N T"], answers: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """p of each answer behind its window."""
    count, (graph, params), options = len(windows), nnx.split(run.model), forward_options(run)
    rows = np.concatenate([windows, np.repeat(windows[:1], READ - count, axis=0)]).astype(np.int32)
    values = np.float32(options["progress"]), options["cuts"]
    p = np.asarray(_predicted(params, rows, *values, graph=graph, causal=options["causal"]))
    return p[np.arange(count), answers]


@functools.partial(jax.jit, static_argnames=("graph", "causal"))
def _predicted(params, rows, progress, cuts, *, graph, causal) -> Float[jax.Array, "N V"]:
    model = nnx.merge(graph, params)
    output = model(jnp.asarray(rows), progress=progress, cuts=cuts, causal=causal)
    return jax.nn.softmax(last_logits(model, output))


def _told(run: OpenRun, found) -> dict:
    answer = run.tokenizer.decode([found.answer])
    seen = {
        "clean": rounded(found.clean, 5),
        "corrupted": rounded(found.corrupted, 5),
        "ends": rounded(found.ends.T, 5),
    }
    return {"answer": answer} | seen


def halves(effect: Sequence[float]) -> float:
    """Mean over the first half of the depths minus that over the second; one in the middle is in neither."""
    half = len(effect) // 2
    return float(np.mean(effect[:half]) - np.mean(effect[-half:]))


def fall(prompt: dict) -> float:
    """Of the effect of the subject's last token."""
    return halves(prompt["ends"][0])


def rise(prompt: dict) -> float:
    """Of the effect of the prompt's last token."""
    return -halves(prompt["ends"][1])


def found_by(records: Sequence[Record]) -> dict[str, list[list[dict]]]:
    """The prompts by scheme and model; a model without any is missing."""
    found: dict[str, list[list[dict]]] = {}
    for record in records:
        if record.metrics.get("prompts"):
            found.setdefault(record.metrics["scheme"], []).append(record.metrics["prompts"])
    return found


def over(models: Sequence[Sequence[dict]], read) -> Interval:
    """Over the models; of a single one over its prompts."""
    if len(models) == 1:
        return mean_interval([read(prompt) for prompt in models[0]])
    return mean_interval([float(np.mean([read(prompt) for prompt in prompts])) for prompts in models])


def crossing(models: Sequence[Sequence[dict]]) -> float:
    """`handover` of the mean effects."""
    means = np.mean([np.mean([prompt["ends"] for prompt in prompts], axis=0) for prompts in models], axis=0)
    return handover(*means)


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    found = found_by(records)
    parts = {scheme: (over(models, fall), over(models, rise)) for scheme, models in found.items()}
    rows = [_row(scheme, found[scheme], *own, records) for scheme, own in parts.items()]
    text = [f"{scheme} {signed(one)} and {signed(other)}" for scheme, (one, other) in parts.items()]
    measured = "indirect effects, of the subject's last token early minus late, and of the prompt's late minus early: "
    measured += ", ".join(text)
    crossed = [f"{scheme} {_share(crossing(models))}" for scheme, models in found.items()]
    reasons = [ALONE] if settings.runs else [f"without {own}" for own in SCHEMES if own not in settings.schemes]
    for scheme in () if settings.runs else settings.schemes:
        reasons += few(len(found.get(scheme, ())), f"models of {scheme} with prompts")
    checks = [(one, (0.0, math.inf)) for own in parts.values() for one in own]
    return Summary(
        f"{measured}; the last token's is above the subject's from this share of the depth on: {', '.join(crossed)}"
        if found
        else "no prompt was found",
        "undecided" if reasons or not found else within(checks),
        rows,
        headline=f"the last token takes over at {', '.join(crossed)} of the depth" if crossed else "",
        reasons=reasons,
    )


def _share(value: float) -> str:
    return "never" if math.isnan(value) else f"{value:.2f}"


def _row(scheme: str, models: list[list[dict]], fell: Interval, rose: Interval, records: Sequence[Record]) -> dict:
    own = [record.metrics for record in records if record.metrics.get("scheme") == scheme]
    total = lambda name: sum(seen.get(name, 0) for seen in own)  # noqa: E731
    mean = lambda name: over(models, lambda prompt: prompt[name]).estimate  # noqa: E731
    return {
        "scheme": scheme,
        "blocks": own[0]["depth"],
        "windows read": total("read"),
        "certain": total("certain"),
        "noised": total("noised"),
        "prompts": sum(map(len, models)),
        "p": f"{mean('clean'):.2f}",
        "with noise": f"{mean('corrupted'):.2f}",
        "subject, early - late": signed(fell),
        "last, late - early": signed(rose),
        "handover": _share(crossing(models)),
    }


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    grids = [(record.metrics["scheme"], one) for record in records for one in record.metrics.get("prompts", ())]
    grids = [(scheme, one) for scheme, one in grids if "effect" in one]
    figure, axes = panels(2 + len(grids), "How far putting back one token's stream brings the answer back")
    for scheme, models in found_by(records).items():
        curves = np.array([np.mean([prompt["ends"] for prompt in prompts], axis=0) for prompts in models])
        places = np.linspace(0, 1, curves.shape[-1])
        for ax, own in zip(axes[:2], np.mean(curves, axis=0), strict=True):
            ax.plot(places, own, **look(scheme) | {"markersize": 3}, label=scheme)
    for ax, title in zip(axes, ("the subject's last token", "the prompt's last token"), strict=False):
        ax.set_title(title)
        ax.set_xlabel("place in depth")
        ax.axhline(0, color="#999999", linewidth=1)
    axes[0].set_ylabel("indirect effect (probability)")
    if axes[0].lines[1:]:
        axes[0].legend(frameon=False)
    for ax, (scheme, one) in zip(axes[2:], grids, strict=True):
        _heat(ax, scheme, one)
    return figure


def _heat(ax: Axes, scheme: str, prompt: dict) -> None:
    """Every token, from below to above, at every depth."""
    image = ax.imshow(np.array(prompt["effect"]).T, aspect="auto", cmap="viridis", origin="lower")
    ax.figure.colorbar(image, ax=ax, label="indirect effect")
    ax.grid(False)
    ax.set_yticks(range(len(prompt["tokens"])), [repr(piece)[1:-1] for piece in prompt["tokens"]], fontsize=7)
    ax.set_title(f"{scheme}: p({prompt['answer']!r}) {prompt['clean']:.2f}, with noise {prompt['corrupted']:.2f}")
    ax.set_xlabel("put back in front of block")


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
