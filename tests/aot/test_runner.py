"""Time limits and dying compilers, with workers that only pretend to compile."""

import sys
import textwrap
import time

from pallas_kernels.aot.cases import Case
from pallas_kernels.aot.runner import run
from pallas_kernels.aot.targets import TARGETS

CASES = [Case("op", "reference", "forward", 1, width, "float32") for width in (1, 2, 3)]


def worker(body):
    """A worker that runs `body` for each case, with `width` and `say` at hand."""
    code = """
        import json, sys, time
        def say(**message): print(json.dumps(message), flush=True)
        order = json.load(sys.stdin)
        print("noise of a compiler"); say(ready=True)
        for index, case in enumerate(order["cases"]):
            width = case["width"]; say(begin=index)
            BODY
            say(end=index, problems=[], width=width)
    """
    return [sys.executable, "-c", textwrap.dedent(code).replace("BODY", body)]


def collect(body, seconds=20.0):
    return [(c.width, r) for c, r in run(TARGETS["v5e"], CASES, seconds=seconds, worker=worker(body))]


def test_results_come_in_order():
    assert collect("pass") == [(w, {"problems": [], "width": w}) for w in (1, 2, 3)]


def test_a_slow_case_is_stopped_and_the_others_go_on():
    start = time.monotonic()
    results = collect("time.sleep(600 * (width == 2))", seconds=2.0)
    assert time.monotonic() - start < 60
    assert [w for w, _ in results] == [1, 2, 3]
    assert results[1][1]["problems"] == ["not compiled within 2 s"]
    assert results[0][1]["problems"] == results[2][1]["problems"] == []


def test_a_dying_compiler_is_reported_with_its_last_words():
    results = collect("if width == 1: sys.exit('out of registers')")
    (problem,) = results[0][1]["problems"]
    assert "ended with 1" in problem and "out of registers" in problem
    assert [r["problems"] for _, r in results[1:]] == [[], []]
