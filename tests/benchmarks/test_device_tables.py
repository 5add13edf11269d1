"""The tables that are made of a device's rows."""

import json

from benchmarks import device_tables
from benchmarks.parts import rows

ORIGIN = {"device": "X", "versions": {"jax": "1"}, "commit": "c", "date": "2026-01-01T00:00:00"}


def test_the_table_of_kernels_has_those_that_failed(tmp_path):
    shape = {"op": "nag_update", "rows": 64, "width": 96, "dtype": "float32"}
    passes = {"forward": {"us": 2.0, "of_copy": 0.5, "vs_reference": 0.25}, "forward+backward": {"us": 5.0}}
    lines = [{"origin": ORIGIN}, {"case": shape | {"implementation": "mosaic_gpu"}, "error": "RuntimeError: no"}]
    lines += [{"case": shape | {"implementation": "xla"}, "result": {"implementations": {"xla": passes}}}]
    lines += [{"case": shape | {"peers": True}, "error": "ImportError: torch"}]
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "kernels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert device_tables.render("kernels", tmp_path).splitlines()[4:] == [
        "| nag_update | 64 x 96 float32 | mosaic_gpu | failed | - | - | - |",
        "| nag_update | 64 x 96 float32 | xla | forward | 2.0 | 50% | 0.25 |",
        "| nag_update | 64 x 96 float32 | peers | failed | - | - | - |",
    ]
    alone = {"implementations": {"mosaic_gpu": {"forward": passes["forward"] | {"host_time": True}}}, "copy_GB/s": 3e3}
    lines = [{"origin": ORIGIN}, {"case": shape | {"implementation": "mosaic_gpu"}, "result": alone}]
    lines[-1]["result"]["error_backward"] = "RuntimeError: no"
    (tmp_path / "box" / "kernels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    header, _, *shown = device_tables.render("kernels", tmp_path).splitlines()[2:]
    assert "of a copy's 3000 GB/s" in header
    assert shown == [
        "| nag_update | 64 x 96 float32 | mosaic_gpu | forward | 2.0 with the host's | 50% | 0.25 |",
        "| nag_update | 64 x 96 float32 | mosaic_gpu | backward | failed | - | - |",
    ]


def test_a_case_that_ended_the_process_counts_as_failed_where_it_was_begun(tmp_path):
    """Also where all others of the file were measured at another commit, and where it is the only one."""
    lines = [{"origin": ORIGIN}, *[{"case": {"case": "a"}, "begun": True}] * rows.TRIES]
    lines += [
        {"origin": {**ORIGIN, "commit": "later"}},
        {"case": {"case": "a"}, "error": "was begun 2 times and never finished"},
    ]
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert device_tables.render("training", tmp_path) == (
        "X, jax 1, commit c, 2026-01-01. 1 of 1 cases failed; training.jsonl has their errors."
    )


def test_a_table_says_where_steps_were_measured_without_the_attention_of_auto(tmp_path):
    (tmp_path / "box").mkdir()
    lines = [{"origin": ORIGIN}, step_times("plain", 100.0, 1.0), step_times("nag", 104.0, 1.04)]
    for row, implementation in zip(lines[1:], ("auto", "xla"), strict=True):
        row["result"]["attention"] = implementation
    (tmp_path / "box" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = device_tables.render("steps", tmp_path).splitlines()[0]
    assert said.endswith("2026-01-01. 1 were measured with XLA's attention: that of auto failed.")


def test_the_pages_are_what_the_results_make_of_them():
    assert device_tables.main(["--check"]) == 0


def test_a_page_without_figures_says_so(tmp_path):
    page = "before\n<!-- device: steps -->\nold\n<!-- end -->\nafter\n"
    text = device_tables.rewritten(page, tmp_path)
    assert "Not measured on any device yet" in text and text.startswith("before") and text.endswith("after\n")


def step_times(scheme, milliseconds, ratio):
    name = {"size": "s", "remat": "block", "kernels": "auto", "scheme": scheme}
    figures = {"milliseconds": milliseconds, "mfu": 0.5, "matmul_flops": 7e14, "temporary_bytes": 2**30}
    ratios = ratio and {"milliseconds": ratio, "flops_per_step": 1.0}
    return {"case": name, "result": figures | {"mfu_of_data_sheet": 0.4, "vs_base": ratios}}


def test_tables_are_of_one_device_version_and_commit(tmp_path):
    (tmp_path / "box").mkdir()
    lines = [{"origin": ORIGIN}, step_times("plain", 100.0, 1.0), step_times("nag", 104.0, 1.04)]
    lines.append({"case": {**lines[-1]["case"], "scheme": "lns"}, "error": "OOM"})
    others = {"device": "Y"}, {"versions": {"jax": "2", "triton": "3"}}, {"commit": "d"}
    for other, milliseconds in zip(others, (10.0, 20.0, 30.0), strict=True):
        lines += [{"origin": ORIGIN | other}, step_times("nag", milliseconds, None)]
    lines += [{"origin": ORIGIN | {"date": "2026-01-02T00:00:00"}}, step_times("rezero", 90.0, 0.9)]
    (tmp_path / "box" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = device_tables.render("steps", tmp_path)
    tables = text.split("ms per step")[1:]
    assert len(tables) == 4
    assert "| nag | 104.0 | 1.040 | 700 | 50.0% (40.0%) | 1.0 GiB |" in tables[0]
    assert "| rezero | 90.0 | 0.900 |" in tables[0]
    for table, milliseconds in zip(tables[1:], ("10.0", "20.0", "30.0"), strict=True):
        assert f"| nag | {milliseconds} | - |" in table
    said = [line for line in text.splitlines() if line and not line.startswith("|")]
    assert said == [
        "X, jax 1, commit c, 2026-01-01 to 2026-01-02. 1 of 4 cases failed; steps.jsonl has their errors.",
        "Y, jax 1, commit c, 2026-01-01.",
        "X, jax 2, triton 3, commit c, 2026-01-01.",
        "X, jax 1, commit d, 2026-01-01.",
    ]
