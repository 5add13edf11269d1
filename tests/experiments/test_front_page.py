"""Every number of the main README about results stands in a result file."""

import json
import re
from pathlib import Path

import pytest

from experiments.harness.evidence import budget
from experiments.harness.pages import findings, front
from experiments.harness.recipe import HOME, names

ROOT = HOME.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"[-+]?\d+\.\d+")


def test_the_findings_are_what_the_program_generates():
    assert front(README) == README, "run python -m experiments.harness.pages"


def test_each_number_of_a_finding_is_in_its_result_file():
    bullets = [line for line in findings().splitlines() if line.startswith("- ")]
    assert bullets
    assert ["**undecided**" in line for line in bullets] == sorted("**undecided**" in line for line in bullets)
    for line in bullets:
        name, size = re.search(r"pages/(\w+)\.md", line)[1], re.search(r"\*\*, (\w+):", line)[1]
        summary = json.loads((HOME / "results" / f"{name}.{size}.json").read_text())["summary"]
        headline = line.split(f", {size}: ")[1].split(" (")[0]
        assert NUMBER.findall(headline) and headline == summary["headline"]


def section(title: str) -> str:
    return README.split(f"## {title}")[1].split("\n## ")[0]


def test_results_are_told_by_generated_lines_only():
    """Results stand between the findings' markers; the prose around them has no measured number."""
    prose = re.sub(r"<!-- findings.*?<!-- end of findings -->", "", section("What is measured"), flags=re.DOTALL)
    about = prose.split("What the [experiments]")[1].split("Apache")[0]
    assert NUMBER.findall(about) == []


def rows(text: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells}


def test_the_demo_s_losses_are_those_of_the_grid_they_were_chosen_from():
    lines = [json.loads(line) for line in (HOME / "results" / "first_grid.jsonl").read_text().splitlines()]
    known = {(one["scheme"], one["learning_rate"], round(one["validation_loss"], 4)) for one in lines}
    table = rows(section("Two commands"))
    rates = [float(cell) for cell in table["learning rate (each scheme's own default)"]]
    losses = [float(cell.strip("*")) for cell in table["validation loss (nats per byte)"]]
    shown = set(zip(("plain", "lns", "review", "nag"), rates, losses, strict=True))
    assert shown <= known
    assert ("highway", 0.008, 2.1154) in known and "reached 2.1154" in README


def measured(file):
    return json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())


def test_the_steps_ratios_are_in_their_file():
    """Of every CPU, the one measured last first."""
    nag, plain = (line.split("|")[-2].strip() for line in README.splitlines() if "`make bench-torch`" in line)

    def told(ratio):
        by_cpu = {one["cpu"]: [ratio(size["results"]) for size in one["sizes"]] for one in measured("step_cpu")}
        return [f"{' and '.join(f'{r:.2f}' for r in own)} ({cpu})" for cpu, own in reversed(by_cpu.items())]

    assert nag.startswith("; ".join(told(lambda found: found["nag"]["ratio_to_plain"])))
    assert plain.startswith("; ".join(told(lambda found: 1 / found["torch_compiled"]["ratio_to_plain"])))


def test_the_ratios_to_transformers_are_in_their_file_and_both_wrote_the_same():
    """Of every CPU, the one measured last first."""
    writes, reads = [], []
    for sitting in reversed(measured("decode_cpu")):
        full = [size for size in sitting["sizes"] if size["weights"] == "full"]
        sizes = {(size["dtype"], size["batch"]): size["results"]["transformers"] for size in full}
        assert all(found["same_tokens"] == 1.0 for (dtype, _), found in sizes.items() if dtype == "float32")
        told = lambda phase, of, sizes=sizes: " and ".join(f"{sizes[of, n][f'{phase}_ratio']:.2f}" for n in (1, 8))  # noqa: E731
        writes.append(f"{told('decode', 'float32')} ({sitting['cpu']})")
        reads.append(f"{told('prefill', 'float32')}, bfloat16 {told('prefill', 'bfloat16')} ({sitting['cpu']})")
    write, read = (line.split("|")[-2].strip() for line in README.splitlines() if "`make bench-decode`" in line)
    assert write == "; ".join(writes) and read.startswith("; ".join(reads))


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("compile_cpu", "compile"),
        ("mod_cpu", "mod --batch 4"),
        ("mod_one_row_cpu", "mod"),
        ("mod_decode_cpu", "mod --phase decode --batch 16"),
        ("mod_prefill_cpu", "mod --phase prefill --batch 16 --depth 8"),
    ],
)
def test_the_benchmarks_ratios_are_in_their_files(file, command):
    found = measured(file)["results"]
    if command == "compile":
        told = f"plain {found['plain']['ratio']:.2f}, NAG {found['nag']['ratio']:.2f}"
    else:
        told = f"time {found['time_ratio']:.2f}, FLOPs {found['flops_ratio']:.2f}"
    line = next(line for line in README.splitlines() if f"`nagjax bench {command}`" in line and line.startswith("|"))
    assert told in line


def test_every_recipe_is_in_the_guide():
    guide = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    missing = [name for name in names() if f"`{name}`" not in guide]
    assert not missing, f"name in docs/reproduce.md: {missing}"


def test_every_result_file_named_exists():
    named = re.findall(r"\]\(((?:experiments|benchmarks)/[\w./]+)\)", README)
    assert named and all((Path(ROOT) / path).exists() for path in named)


def numbers(value) -> set[float]:
    """All numbers in a JSON value, including those in its strings."""
    if isinstance(value, dict):
        return set().union(*map(numbers, [*value.values(), *value]))
    if isinstance(value, list):
        return set().union(*map(numbers, value))
    if isinstance(value, str):
        return {abs(float(found)) for found in NUMBER.findall(value)}
    return {abs(float(value))} if isinstance(value, float) else set()


def measured_in(name: str) -> str:
    """The part of REPORT.md or OBSERVATIONS.md that tells measured numbers."""
    text = (HOME / name).read_text(encoding="utf-8")
    return text.split("## What is known now")[-1].split("## What is not known")[0]


@pytest.mark.parametrize("name", ["REPORT.md", "OBSERVATIONS.md"])
def test_the_measured_numbers_are_in_the_result_files_of_the_pages_that_are_linked(name):
    """Each as rounded there."""
    bullets = measured_in(name).split("\n- ")[1:]
    assert bullets
    for bullet in bullets:
        assert_measured(bullet)


def assert_measured(text: str) -> None:
    """Every number of a text, as rounded there, is in a result file of a page that it links."""
    named = re.findall(r"pages/(\w+)\.md", text)
    known = set()
    for path in (HOME / "results").glob("*.json"):
        if path.name.split(".")[0] in named:
            summary = json.loads(path.read_text())["summary"]
            known |= numbers(summary) | numbers(budget(summary["evidence"]))
    for told in NUMBER.findall(text):
        digits = len(told.split(".")[1])
        assert any(abs(abs(float(told)) - one) <= 0.5001 * 10**-digits for one in known), (told, named)


def test_what_the_main_readme_says_of_skipping_is_in_the_result_files():
    (told,) = re.findall(r"After 5\.1M tokens .*?Other schemes", section("Let tokens skip"), re.DOTALL)
    assert len(NUMBER.findall(told)) > 10
    assert_measured(told)


def comparison(name: str) -> dict[tuple[str, str], dict]:
    """The rows of a result's table by shape and arm."""
    table = json.loads((HOME / "results" / f"{name}.json").read_text())["summary"]["table"]
    return {(row["shape"], row["arm"]): row for row in table}


def told_table() -> dict[str, list[str]]:
    return {name: cells for line in measured_in("REPORT.md").splitlines() for name, cells in rows(line.strip()).items()}


def test_the_reports_table_has_each_number_in_its_place():
    found = {name: cells for name, cells in told_table().items() if re.match(r"[\d.]+M, \d+$", name)}
    assert len(found) == 4
    for name, told in found.items():
        tokens, depth = name.split(", ")
        known = comparison("equal_flops.cpu" if tokens == "1M" else "equal_flops.longer")
        nag, plain, review = (known[f"{depth}x64-{tokens}", arm] for arm in ("nag-1-longer", "plain-longer", "review"))
        losses = [float(row["loss"].split()[0]) for row in (nag, plain, review)]
        assert [float(one) for one in told[:3]] == pytest.approx(losses, abs=0.00051)
        assert told[3:] == [plain["minus nag-1-longer"], review["minus nag-1-longer"]]


def test_the_reports_answer_and_threats_have_the_extremes_of_what_is_measured():
    text = " ".join((HOME / "REPORT.md").read_text(encoding="utf-8").split())
    names = [f"{name}.{size}" for name in ("equal_flops", "equal_flops_rezero") for size in ("cpu", "longer")]
    every = [row for name in names for row in comparison(name).values()]
    gaps = [float(row["minus nag-1-longer"].split()[0]) for row in every if row["minus nag-1-longer"]]
    assert f"by {min(gaps):.2f} to {max(gaps):.2f} nats" in text
    decided = [*names, "sixty_four_blocks.longer", "depth_scaling.longer", "experts.cpu", "tokens_and_depth.cpu64"]
    errors = [float(row["grid error"]) for name in decided for row in comparison(name).values()]
    assert f"may be {max(errors):.3f} nats above" in text
    deep = {row["arm"]: row["small updates"] for row in every if row["shape"] == "64x64-2.1M"}
    assert f"{float(deep['nag-1-longer']):.0f} of NAG's 128 sublayers" in text
    assert f"{float(deep['plain-longer']):.0f} of plain's" in text and deep["plain-longer"] == deep["review"]
    shallow = [float(row["small updates"]) for row in every if row["shape"][:2] == "16" and "nag" in row["arm"]]
    assert max(shallow) < 1 and "at 16 blocks fewer than one of 32 (means" in text


def test_the_report_tells_all_that_is_decided_on_two_pages():
    """Every recipe with a decided result is linked in it, and their number is told."""
    decided = re.findall(r"\*\*(?:not )?supported\*\*.*?pages/(\w+)\.md", findings())
    number = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")[len(decided)]
    assert f"**{number.capitalize()} results are decided.**" in measured_in("REPORT.md")
    assert set(decided) <= set(re.findall(r"pages/(\w+)\.md", measured_in("REPORT.md")))
    assert len((HOME / "REPORT.md").read_text(encoding="utf-8").split()) < 1500
