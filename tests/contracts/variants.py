"""Every scheme, found automatically, with the options that change its parameters. With ONE_PER_STREAM in the
environment, one scheme for every kind of stream."""

import os

from nagjax.residual.registry import find_scheme, schemes
from tests.streams import one_per_stream

OPTIONS = {
    "review-rank_2": lambda: find_scheme("review")(rank=2),
    "mix_ln-half": lambda: find_scheme("mix_ln")(post=0.5),
}
SCHEMES = (
    {name: find_scheme(name) for name in one_per_stream()} if os.environ.get("ONE_PER_STREAM") else schemes() | OPTIONS
)
