"""Result files: what was run and where, the records, and what they say about the claim."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.harness.jobs import Record
from experiments.harness.verdicts import Verdict
from nagjax.errors import UserError
from nagjax.files import write_text
from nagjax.report.style import RC
from nagjax.runs.config import flatten

SHORT = 30  # number of options up to which a config is written in full
LISTS = ',\n "floors": ['  # in a result file, where the lists of runs end


@dataclasses.dataclass(frozen=True)
class Summary:
    """What the records show: one line for the README, the verdict on the claim, and a table with a row per arm."""

    measured: str
    verdict: Verdict
    table: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)  # `evidence.concluded` reads two of them
    headline: str = ""  # one number with its interval; "": the beginning of `measured` is used
    reasons: list[str] = dataclasses.field(default_factory=list)  # why the claim is undecided, if so
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)  # `evidence.Evidence`; none without trainings


def result_file(home: Path, name: str, size: str) -> Path:
    return home / "results" / f"{name}.{size}.json"


def unfinished_file(home: Path, name: str, size: str) -> Path:
    return home / "unfinished" / f"{name}.{size}.json"


def plot_file(home: Path, name: str, size: str) -> Path:
    return home / "plots" / f"{name}.{size}.png"


def write_result(
    home: Path,
    name: str,
    size: str,
    command: str,
    settings: Any,
    records: Sequence[Record],
    summary: Summary,
    floors: Sequence[Record] = (),
) -> Path:
    """Writes results/NAME.SIZE.json and returns its path. Removes unfinished/NAME.SIZE.json if that contains nothing
    else."""
    path = result_file(home, name, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _told(name, size, command, settings, records, floors, {"summary": dataclasses.asdict(summary)}))
    before, ours = unfinished_file(home, name, size), {record.name for record in (*records, *floors)}
    if all(record.name in ours or _trial(record, records) for record in records_in(before)):
        before.unlink(missing_ok=True)
    return path


def _trial(record: Record, records: Sequence[Record]) -> bool:
    """Whether the record is a trial of a rate that is also contained in its tuning's record, one of `records`."""
    place = {name: value for name, value in record.labels.items() if name not in ("factor", "seed")}
    losses = [own.metrics.get("losses", ()) for own in records if own.labels == place]
    return any(factor == record.labels.get("factor") for own in losses for factor, _ in own)


def write_summary(home: Path, name: str, size: str, summary: Summary) -> None:
    """Replaces the summary in a result file; everything else in it stays."""
    path = result_file(home, name, size)
    text = path.read_text(encoding="utf-8")
    head, lists = text.split(LISTS)
    values = json.loads(head + "}") | {"summary": dataclasses.asdict(summary)}
    write_text(path, json.dumps(values, indent=1)[:-2] + LISTS + lists)


def write_unfinished(
    home: Path, name: str, size: str, command: str, settings: Any, records: Sequence[Record], floors: Sequence[Record]
) -> Path:
    """Writes the finished jobs of an unfinished plan to unfinished/NAME.SIZE.json, and keeps other jobs that are in
    this file."""
    path = unfinished_file(home, name, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        before, ours = read_result(path), {record.name for record in (*records, *floors)}
        records = [*(record for record in before["records"] if record.name not in ours), *records]
        floors = [*(floor for floor in before["floors"] if floor.name not in ours), *floors]
    write_text(path, _told(name, size, command, settings, records, floors, {}))
    return path


def _told(
    name: str,
    size: str,
    command: str,
    settings: Any,
    records: Sequence[Record],
    floors: Sequence[Record],
    summary: dict[str, Any],
) -> str:
    """The text of a result file: one line for each run; what all runs have in common is written once."""
    shared_config, own_configs = _split_common([flatten(record.config) for record in records])
    configs = _by_difference([record.name for record in records], own_configs)
    shared_origin, origins = _split_common([record.origin for record in records])
    head = {
        "recipe": name,
        "size": size,
        "command": command,
        "settings": dataclasses.asdict(settings),
        **summary,
        "seconds": round(sum(record.seconds for record in records), 1),
        "origin": shared_origin,
        "config": shared_config,
    }
    runs = [
        {"name": r.name, "labels": r.labels} | config | {"metrics": r.metrics, "seconds": r.seconds} | own
        for r, config, own in zip(records, configs, [{"origin": o} if o else {} for o in origins], strict=True)
    ]
    lines = ",\n  ".join(json.dumps(run) for run in runs)
    tables = ",\n  ".join(json.dumps(dataclasses.asdict(floor)) for floor in floors)
    return f'{json.dumps(head, indent=1)[:-2]}{LISTS}\n  {tables}\n ],\n "runs": [\n  {lines}\n ]\n}}\n'


def read_result(path: Path) -> dict[str, Any]:
    """The content of a result file; `records` holds its runs as `Record`s with flat configs, `floors` those of the
    n-gram tables. Raises UserError if the file is damaged."""
    try:
        return _read(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("results", str(path), f"cannot be read ({error}): bring it back, or delete it") from None


def _read(values: dict[str, Any]) -> dict[str, Any]:
    again = {"computed_again": values["computed_again"]} if "computed_again" in values else {}
    values["floors"] = [Record(**floor) for floor in values.get("floors", ())]
    configs: dict[str, dict[str, Any]] = {}
    for run in values["runs"]:
        like = configs[run["like"]] if "like" in run else values["config"]
        kept = {key: value for key, value in like.items() if key not in run.get("without", ())}
        configs[run["name"]] = kept | run["config"]
    values["records"] = [
        Record(
            run["name"],
            run["labels"],
            configs[run["name"]],
            run["metrics"],
            run["seconds"],
            values["origin"] | again | run.get("origin", {}),
        )
        for run in values["runs"]
    ]
    return values


def records_in(path: Path) -> list[Record]:
    """All records in a result file, including its n-gram tables; none if there is no file."""
    result = read_result(path) if path.exists() else {"records": (), "floors": ()}
    return [*result["records"], *result["floors"]]


def write_plot(home: Path, name: str, size: str, draw, *arguments) -> Path:
    """Draws and writes plots/NAME.SIZE.png; the same arguments give the same bytes."""
    path = plot_file(home, name, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **RC, "backend": "agg"}):
        figure: Figure = draw(*arguments)
        figure.savefig(path, format="png", metadata={"Software": None}, bbox_inches="tight")
    return path


def _split_common(dictionaries: Sequence[dict]) -> tuple[dict, list[dict]]:
    first = dictionaries[0] if dictionaries else {}
    common = {k: v for k, v in first.items() if all(k in d and d[k] == v for d in dictionaries)}
    return common, [{k: v for k, v in d.items() if k not in common} for d in dictionaries]


def _by_difference(names: Sequence[str], configs: Sequence[dict]) -> list[dict[str, Any]]:
    """For each run its `config`. A long config that is mostly equal to an earlier run's is stored as `like` (that run),
    `config` (what is changed or added) and `without` (the keys that it lacks)."""
    whole: dict[str, dict] = {}
    told = []
    for name, config in zip(names, configs, strict=True):
        if len(config) < SHORT:
            told.append({"config": config})
            continue
        changed = {
            other: {k: v for k, v in config.items() if k not in own or own[k] != v} for other, own in whole.items()
        }
        nearest = min(changed, key=lambda other: len(changed[other]), default=None)
        if nearest is None or len(changed[nearest]) > len(config) / 2:
            whole[name] = config
            told.append({"config": config})
        else:
            gone = [key for key in whole[nearest] if key not in config]
            told.append({"like": nearest, "config": changed[nearest]} | ({"without": gone} if gone else {}))
    return told
