"""What a lowered program calls when a kernel of ours is in it."""

CUSTOM_CALL = {
    "mosaic_tpu": "tpu_custom_call",
    "pallas_triton": "xla.gpu.triton",
    "triton": "triton_kernel_call",
}
