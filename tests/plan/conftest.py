import pytest


@pytest.fixture
def result():
    """A plan as JSON values: 64 chips as 4 copies of 16 shards, too large for its memory."""
    gib = 2**30
    return {
        "label": "1B",
        "topology": "v5e:8x8",
        "chips": 64,
        "chip": {"name": "TPU v5e", "flops": 197e12, "bandwidth": 819e9, "egress": 200e9, "source": "s", "memory": "m"},
        "options": "--scheme nag",
        "config": {
            "model": {"remat": "none", "heads": 16, "context": 2048},
            "train": {"batch": 256, "accumulate": 1},
        },
        "choices": {"dtype": "bfloat16", "attention": "splash", "notes": ()},
        "tokens_per_step": 256 * 2048,
        "mesh": {"data": 4, "fsdp": 16, "tensor": 1},
        "parameters": 10**9,
        "memory": {
            "parameters": 4 * gib,
            "optimizer": 8 * gib,
            "batch": 1024,
            "saved": 40 * gib,
            "needed": 60 * gib,
            "capacity": 16 * gib,
        },
        "fits": False,
        "saved_by_remat": {"dots": 20 * gib, "block": 2 * gib},
        "advice": ["--remat block"],
        "seconds_to_compile": 60.0,
        "seconds_to_lower": 1.0,
        "peak_rss": gib,
        "jax": "0",
    }


@pytest.fixture
def fitting(result):
    """The same, with everything a program that fits has."""
    gib = 2**30
    found = result | {"fits": True, "flops": 1e12, "moved": 1e10, "sent": 1e9, "intensity": 100.0, "kernels": {"k": 3}}
    found["memory"] = result["memory"] | {"peak": 15 * gib}
    found["collectives"] = {"all-gather": {"count": 7, "sent": 1e9}}
    found["bound"] = {"compute": 0.005, "memory": 0.012, "interconnect": 0.001, "seconds": 0.012, "limit": "memory"}
    rates = {"tokens_per_second": 4e7, "tokens_per_second_per_chip": 7e5, "highest_mfu": 0.25}
    return found | rates | {"dollars_per_hour": 1.2, "dollars_per_billion_tokens": 0.5}
