"""The custom calls of lowered programs that contain one of the kernels, and how kernels are interpreted."""

from jax.experimental.pallas import tpu as pltpu

CUSTOM_CALL = {
    "mosaic_tpu": "tpu_custom_call",
    "pallas_triton": "xla.gpu.triton",
    "triton": "triton_kernel_call",
}
PLATFORM = {"mosaic_tpu": "tpu", "pallas_triton": "cuda"}

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait", out_of_bounds_reads="raise"
)
INTERPRETERS = {"mosaic_tpu": STRICT, "pallas_triton": True}
