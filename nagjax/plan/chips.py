"""The chips that can be planned for: published peaks with their sources, and the facts that the compiler needs."""

import dataclasses

TPU_SOURCE = "https://docs.cloud.google.com/tpu/docs/{}"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one chip. `egress` is its bandwidth to other chips over all its links, in one direction."""

    name: str
    title: str
    platform: str  # "tpu" or "cuda"
    flops: float  # dense bfloat16, FLOP/s
    memory: int  # bytes a program can have
    bandwidth: float  # main memory, bytes/s
    egress: float  # bytes/s
    links: int  # links that share the egress; 1 if every chip reaches every other at full rate
    shapes: tuple[str, ...]  # published slices, or numbers of chips in a machine
    source: str
    memory_note: str
    whole: int = 0  # GPUs only: bytes of their whole memory

    @property
    def description(self) -> str:
        """XLA's description of a GPU, as a text proto."""
        if self.platform != "cuda":
            return ""
        from pallas_kernels.aot.targets import gpu_description

        return gpu_description(self.title, self.whole, self.bandwidth)

    def spelled(self, shape: str) -> str:
        """The full name of the topology with this shape."""
        return f"{self.name}:{shape}" if self.platform == "tpu" else f"{self.name}x{shape}"


def _tpu(name, title, flops, memory, bandwidth, egress, links, shapes, page) -> Chip:
    note = "what the TPU compiler gives a program"
    return Chip(
        name,
        title,
        "tpu",
        flops,
        int(memory * 2**30),
        bandwidth,
        egress,
        links,
        tuple(shapes.split()),
        TPU_SOURCE.format(page),
        note,
    )


GPU_SHARE = 0.75  # of the memory: JAX's default for XLA_CLIENT_MEM_FRACTION


def _gpu(name, title, flops, memory, bandwidth, source) -> Chip:
    note = f"{GPU_SHARE:.0%} of {memory / 2**30:.1f} GiB, JAX's default; XLA_CLIENT_MEM_FRACTION=0.95 gives more"
    counts = ("1", "2", "4", "8")
    usable = int(GPU_SHARE * memory)
    return Chip(name, title, "cuda", flops, usable, bandwidth, 450e9, 1, counts, source, note, int(memory))


FLAT = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
CUBIC = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x4 8x8x8 8x8x16"

# Interconnect: Google gives it per chip and direction (v5e 1,600 Gb/s, v5p 4,800, v6e 3,584), NVIDIA for both
# directions together (NVLink 4: 900 GB/s, which is 450 each way).
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v5e", "TPU v5e", 197e12, 15.75, 819e9, 200e9, 4, FLAT, "v5e"),
        _tpu("v5p", "TPU v5p", 459e12, 95.73, 2765e9, 600e9, 6, CUBIC, "v5p"),
        _tpu("v6e", "TPU v6e", 918e12, 31.24, 1640e9, 448e9, 4, FLAT, "v6e"),
        _gpu("h100", "NVIDIA H100", 989.4e12, 85520809984, 3.35e12, "https://www.nvidia.com/en-us/data-center/h100/"),
        _gpu("h200", "NVIDIA H200", 989.4e12, 151397597184, 4.8e12, "https://www.nvidia.com/en-us/data-center/h200/"),
    )
}
