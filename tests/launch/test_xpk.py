"""launch/xpk.sh: what every pod runs, and how it ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.test_cloud_tpu import program

SCRIPT = Path(__file__).parents[2] / "launch" / "xpk.sh"
WAITS = "trap 'exit {code}' TERM; touch begun; while :; do sleep 0.02; done"


@pytest.fixture
def command(tmp_path):
    """What xpk is given to run, and where programs are found."""
    last = 'while [ "$1" != --command ]; do echo "$1"; shift; done > options; printf %s "$2" > command'
    program(tmp_path / "bin" / "xpk", last)
    own = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    given = {"PROJECT": "p", "CLUSTER": "c", "IMAGE": "i", "OPTIONS": "--preset\n1M", "STEPS": "20"}
    subprocess.run(["bash", SCRIPT], env=own | given, cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "options").read_text().split()[-4:-2] == ["--restart-on-exit-codes", "1,2"]
    return (tmp_path / "command").read_text(), own


@pytest.mark.parametrize(("code", "ends"), [(0, 143), (2, 2)])
def test_a_pod_that_was_asked_to_end_is_started_again(command, tmp_path, code, ends):
    """nagjax saves and ends with 0, which Kubernetes takes for the end of the training; its failures stay what they
    are."""
    text, own = command
    program(tmp_path / "bin" / "nagjax", WAITS.format(code=code))
    pod = subprocess.Popen(["bash", "-c", text], env=own, cwd=tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.02)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(60) == ends


@pytest.mark.parametrize("code", [0, 1])
def test_a_pod_that_ends_by_itself_ends_as_nagjax_does(command, tmp_path, code):
    text, own = command
    assert "\n" not in text, "xpk writes it into a line of YAML"
    program(tmp_path / "bin" / "nagjax", f'echo "$@" > given; exit {code}')
    assert subprocess.run(["bash", "-c", text], env=own, cwd=tmp_path, timeout=60).returncode == code
    assert (tmp_path / "given").read_text() == "train --preset 1M --steps 20\n"
