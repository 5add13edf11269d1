"""Shapes and dtypes in annotations are those that run: one scheme for every kind of stream, dense and routed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.streams import one_per_stream

FOLDER = Path(__file__).parent


def test_programs_run_as_they_are_annotated():
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, str(FOLDER / "typed_programs.py"), *one_per_stream()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
