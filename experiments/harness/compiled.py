"""What a run's compiled training step takes, and how far each of its sublayers turned the stream in the end."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from nagjax.measure.step_times import compiled_anew
from nagjax.runs.config import RunConfig
from nagjax.runs.log import load_run
from nagjax.runs.opening import open_run
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.state import Blueprint

SHALLOW = 12


def compiled_and_turned(folder: Path) -> dict[str, Any]:
    """compile_seconds and compile_seconds_12 (at 12 blocks); temporary_bytes; turn_degrees by sublayer."""
    config = open_run(folder).config
    own, program = _compiled(config)
    shallow, _ = _compiled(dataclasses.replace(config, model=dataclasses.replace(config.model, depth=SHALLOW)))
    memory = program.memory_analysis()
    return {
        "compile_seconds": round(own, 2),
        "compile_seconds_12": round(shallow, 2),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "turn_degrees": [round(float(turn), 5) for turn in np.degrees(load_run(folder).depth_log.turn[-1])],
    }


def _compiled(config: RunConfig) -> tuple[float, Any]:
    """Seconds, and the program, whatever was compiled before."""
    return compiled_anew(Blueprint.of(config, make_mesh(config.mesh)))
