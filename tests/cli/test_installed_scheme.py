"""A scheme that another installed package brings, on the command line."""

import os
import subprocess
import sys

SCHEME = '''
import dataclasses
from typing import ClassVar

from nagjax.residual.schemes.plain import Plain


@dataclasses.dataclass(frozen=True)
class Damped(Plain):
    """Plain pre-norm whose updates are damped."""

    name: ClassVar[str] = "damped"
    title: ClassVar[str] = "damped pre-norm"
    factor: float = 0.5  # on every update

    def advance(self, stream, update, at):
        return super().advance(stream, self.factor * update, at)
'''


def test_it_trains_and_is_opened_and_its_options_are_known(tmp_path):
    info = tmp_path / "damped-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damped\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nagjax.schemes]\ndamped = damped_package:Damped\n")
    (tmp_path / "damped_package.py").write_text(SCHEME)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}

    def nagjax(*arguments, here=tmp_path):
        command = [sys.executable, "-m", "nagjax", *arguments]
        return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)

    size = "--depth 2 --width 16 --context 16 --steps 2 --batch 8".split()
    trained = nagjax("train", "--scheme", "damped", "--scheme.factor", "0.25", *size, "--out", "run")
    assert trained.returncode == 0 and "damped pre-norm" in trained.stderr, trained.stderr
    opened = nagjax("eval", "run", "--batches", "1")
    assert opened.returncode == 0 and "loss" in opened.stdout, opened.stderr
    refused = nagjax("train", "--scheme", "dampd")
    assert refused.returncode == 2 and "did you mean 'damped'?" in refused.stderr
    env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    (tmp_path / "elsewhere").mkdir()
    gone = nagjax("eval", tmp_path / "run", here=tmp_path / "elsewhere")
    assert gone.returncode == 2 and "'damped'" in gone.stderr
