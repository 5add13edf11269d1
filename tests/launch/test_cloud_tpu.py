"""launch/cloud_tpu.sh, with stand-ins for the programs of Google Cloud and of the slice's hosts."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "cloud_tpu.sh"
GCLOUD = """
case "$*" in
  *"tpu-vm describe"*) echo v5litepod-16 ;;
  *describe*) echo ACTIVE ;;
  *"tpu-vm ssh"*) while [ "$1" != --command ]; do shift; done; bash -c "$2" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def started(tmp_path: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """The script, run in a home that has the stand-ins in bin/."""
    own = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    env = own | {"PROJECT": "p", "BUCKET": "b", "SOURCE": "s"} | given
    return subprocess.run(["bash", SCRIPT], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)


def test_a_second_start_goes_on_with_the_bucket_that_is_mounted(tmp_path):
    """Root may not look into what another user has mounted."""
    stand_ins = {"gcloud": GCLOUD, "sudo": "exit 1", "mountpoint": "exit 0", "gcsfuse": "exit 1"}
    for name, text in stand_ins.items():
        program(tmp_path / "bin" / name, text)
    for name in ("python", "pip", "nagjax"):
        program(tmp_path / "nagjax" / "bin" / name, f'echo {name} "$@"')
    given = {"OPTIONS": "--preset 1M", "STEPS": "20"}
    done = started(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    new_code = "pip install -q --force-reinstall --no-deps nagjax @ s"
    told = ["pip install -q nagjax[tpu] @ s", new_code, "nagjax train --preset 1M --steps 20"]
    assert done.stdout.splitlines() == told
    done = started(tmp_path, **given, TYPE="v5litepod-8", CONSTRAINTS="c.txt")
    assert done.returncode == 1 and "is a v5litepod-16, not a v5litepod-8: delete it first" in done.stderr
    done = started(tmp_path, **given, CONSTRAINTS="c.txt")
    assert done.stdout.splitlines()[0] == "pip install -q -c c.txt nagjax[tpu] @ s"


def test_a_command_that_runs_once_more_ends_while_the_first_trains(tmp_path):
    """gcloud repeats what it runs by ssh where the connection breaks off, and the first command goes on."""
    twice = GCLOUD.replace(
        'bash -c "$2"', 'bash -c "$2" & until [ -e begun ]; do sleep 0.02; done; bash -c "$2"; touch end; wait'
    )
    for name, text in {"gcloud": twice, "mountpoint": "exit 0", "gcsfuse": "exit 1"}.items():
        program(tmp_path / "bin" / name, text)
    for name in ("python", "pip"):
        program(tmp_path / "nagjax" / "bin" / name, "")
    program(tmp_path / "nagjax" / "bin" / "nagjax", 'echo "$@"; touch begun; until [ -e end ]; do sleep 0.02; done')
    done = started(tmp_path, OPTIONS="--preset 1M \n --seed 1", STEPS="20")
    assert done.stdout.splitlines() == ["train --preset 1M --seed 1 --steps 20"]
    assert done.stderr.splitlines() == ["a training still runs on this host: stop it first"]


def test_a_resource_that_was_deleted_meanwhile_ends_the_wait(tmp_path):
    made = "*describe*) [ -e made ] || exit 1; echo x >> asked; [ $(wc -l < asked) -gt 3 ] || echo WAITING ;;"
    program(tmp_path / "bin" / "gcloud", f'case "$*" in *"tpu-vm describe"*) ;; {made} *create*) touch made ;; esac')
    program(tmp_path / "bin" / "sleep", "")
    done = started(tmp_path)
    assert done.returncode == 1 and "the queued resource is gone" in done.stderr


@pytest.mark.parametrize(
    ("capacity", "asked"), [({}, ["--spot"]), ({"CAPACITY": "--reserved"}, ["--reserved"]), ({"CAPACITY": ""}, [])]
)
def test_capacity_is_what_was_asked_for(capacity, asked, tmp_path):
    created = '*describe*) [ ! -e made ] || echo FAILED ;; *create*) touch made; echo "$@" ;;'
    gcloud = f'case "$*" in *"tpu-vm describe"*) ;; {created} esac'
    program(tmp_path / "bin" / "gcloud", gcloud)
    words = started(tmp_path, **capacity).stdout.split()
    assert "create" in words and [word for word in words if word in ("--spot", "--reserved")] == asked
