"""Draw which sublayers each token of a text goes through."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL


def main(
    run: Annotated[Path, POSITIONAL], text: str | None = None, file: Path | None = None, top_k: bool = False
) -> None:
    """Draw which sublayers each token of a text goes through, coloured by rotation angle: map.png in the run's folder.

    Args:
        run: a run folder.
        text: the text.
        file: a file with the text.
        top_k: choose the top k tokens of a sequence, as in training, instead of asking the causal decider.
    """
    from nagjax.generate.paths import read_text, token_paths
    from nagjax.report.maps import write_map
    from nagjax.runs.opening import open_run

    opened = open_run(run)
    paths = token_paths(opened, read_text(text, file), top_k=top_k)
    model = opened.config.model
    title = f"{opened.config.scheme.title}, {model.depth} blocks x {model.width}"
    print(f"{1 - paths['ran'].mean():.1%} of the (token, sublayer) pairs skipped: {write_map(paths, run, title)}")
