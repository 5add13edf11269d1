"""The compiler's process: whatever happens to it is one readable error."""

import json
import sys

import pytest

from nagjax.errors import UserError
from nagjax.plan.compile import bounds, run_worker
from nagjax.plan.topology import parse
from nagjax.plan.worker import needed


def worker(code):
    return sys.executable, "-c", f"import json, os, pathlib, signal, sys, time\n{code}"


def test_an_answer_is_passed_on():
    code = "order = json.load(sys.stdin); pathlib.Path(sys.argv[1]).write_text(json.dumps({'fits': order['x']}))"
    assert run_worker('{"x": true}', 30, worker(code))["fits"] is True


def test_warnings_of_the_partitioner_are_counted():
    code = "print('E0 [SPMD] Involuntary full rematerialization. ..', file=sys.stderr)\n"
    code += "pathlib.Path(sys.argv[1]).write_text('{}')"
    assert run_worker("{}", 30, worker(code))["involuntary_rematerializations"] == 1


@pytest.mark.parametrize(
    "code, words",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ran out of memory"),
        ("print('check failed: x', file=sys.stderr); sys.exit(3)", "exit code 3.*check failed: x"),
        ("pathlib.Path(sys.argv[1]).write_text(json.dumps({'error': 'ValueError: no'}))", "ValueError: no"),
    ],
)
def test_a_crash_is_an_error_message(code, words):
    with pytest.raises(UserError, match=words):
        run_worker("{}", 30, worker(code))


def test_a_compiler_that_hangs_is_stopped():
    with pytest.raises(UserError, match="^minutes = 0.00833.*time limit: give more"):
        run_worker("{}", 0.5, worker("time.sleep(60)"))


@pytest.mark.parametrize(
    "message, size",
    [
        ("Ran out of memory in memory space hbm. Used 25.50G of 15.75G hbm. Exceeded", 25.5 * 2**30),
        ("the total memory required for HLO temporaries (384.00G) exceeds available HBM (15.25G)", 384 * 2**30),
        ("Out of memory while trying to allocate 12.5GiB", 12.5 * 2**30),
        ("something else", None),
    ],
)
def test_what_a_refusal_says_is_needed(message, size):
    assert needed(message) == size


def test_bounds_are_plain_json():
    found = {"flops": 1e12, "moved": 1e10, "sent": 1e9, "model_flops_per_token": 1e6}
    result = json.loads(json.dumps(bounds(found, parse("v5e:4x4"), 1000, 2.0)))
    assert result["bound"]["limit"] == "memory" and result["intensity"] == 100
    assert result["highest_mfu"] == pytest.approx(1e6 * result["tokens_per_second_per_chip"] / 197e12)
