"""A lower bound of the step time: a step is no faster than its slowest resource."""

import dataclasses

from nagjax.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step that each resource needs at its published peak."""

    compute: float
    memory: float
    interconnect: float

    @classmethod
    def of(cls, topology: Topology, flops: float, moved: float, sent: float) -> "Roofline":
        """The roofline of one chip and step, from its `flops`, the bytes `moved` to and from main memory, and the bytes
        `sent` to other chips."""
        chip = topology.chip
        return cls(flops / chip.flops, moved / chip.bandwidth, sent / topology.egress if sent else 0.0)

    @property
    def seconds(self) -> float:
        """A lower bound of the step time, reached if all three overlapped perfectly."""
        return max(self.compute, self.memory, self.interconnect)

    @property
    def limit(self) -> str:
        return max(("compute", "memory", "interconnect"), key=lambda name: getattr(self, name))


def throughput(seconds: float, tokens: int, chips: int, dollars_per_hour: float | None) -> dict:
    """Tokens per second at a step time of `seconds`; with a price per chip and hour also dollars per billion tokens."""
    rate = tokens / seconds
    price = None if dollars_per_hour is None else dollars_per_hour * chips / 3600 / rate * 1e9
    return {"tokens_per_second": rate, "tokens_per_second_per_chip": rate / chips, "dollars_per_billion_tokens": price}
