"""Compile time and memory of a run's training step, and the final turn angle of each of its sublayers."""

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
    """compile_seconds and compile_seconds_12 (of the model with 12 blocks); temporary_bytes; turn_degrees by
    sublayer."""
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
    """The seconds of compilation, without using a cache, and the program."""
    return compiled_anew(Blueprint.of(config, make_mesh(config.mesh)))
