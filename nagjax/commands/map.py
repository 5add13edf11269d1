"""Draw which sublayers each token of a text goes through."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.console import note


def main(
    run: Annotated[Path, POSITIONAL],
    text: str | None = None,
    file: Path | None = None,
    top_k: bool = False,
    out: Path | None = None,
) -> None:
    """Draw which sublayers each token of a text goes through, coloured by rotation angle: map.png in the run's folder.

    If the text is longer than the run's context, only its beginning is drawn.

    Args:
        run: a run folder, or a model that nagjax import reads.
        text: the text to draw.
        file: a file with the text, in place of --text.
        top_k: choose the tokens that run by top-k over the sequence, as in training, instead of by the causal decider.
        out: folder for map.png and map.json; by default the run's folder (refused while the run is training), or
            NAME-report for a model that is not a run.
    """
    note(f"drawing the tokens' ways through {run}")
    from nagjax.files import check_writable
    from nagjax.generate.paths import read_text, token_paths
    from nagjax.interop.hub import report_folder
    from nagjax.interop.load import load
    from nagjax.report.maps import write_map
    from nagjax.runs.lock import lock_of_report

    opened, words, place = load(run), read_text(text, file), report_folder(run, out)
    check_writable(place)
    with lock_of_report(place, "map"):
        paths = token_paths(opened, words, top_k=top_k)
        model = opened.config.model
        title = f"{opened.config.scheme.title}, {model.depth} blocks x {model.width}"
        page = write_map(paths, place, title)
    shown, given = len(paths["tokens"]), paths["given"]
    left = f" (the first {shown} of {given} tokens, all that the context holds)" if shown < given else ""
    print(f"{1 - paths['ran'].mean():.1%} of the (token, sublayer) pairs skipped{left}: {page}")
