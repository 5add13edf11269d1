"""Print a file of options that `nagjax train FILE` takes."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL, Given
from nagjax.errors import UserError
from nagjax.options import RunOptions


def main(options: RunOptions, given: Given, run: Annotated[Path | None, POSITIONAL] = None) -> None:
    """Print a run's options as YAML: given options as lines, all others as comments with their defaults.

    Write a file with nagjax config --depth 48 > run.yaml, and train with nagjax train run.yaml; options on the command
    line replace those in the file. nagjax config RUN prints the options of an existing run; a size that follows from
    other options, such as heads from the width, is a comment there, so that it adapts to a changed width.

    Args:
        run: a run folder.
    """
    from nagjax.config_file import config_text

    if run is None:
        print(config_text(options, given.keys()), end="")
        return
    given.refuse(sorted(given.keys() - {"run"}), "a run has all its options already: give its folder alone")
    from nagjax.files import has_file
    from nagjax.options import options_of_run
    from nagjax.runs.names import PRUNED
    from nagjax.runs.opening import read_config, read_origin

    config = read_config(run)
    if has_file(run / PRUNED) or config.model.kept and not config.start:
        raise UserError("run", str(run), "was pruned, which no options say: train on from it with --start")
    config.model.check_causal("a training by options")
    if read_origin(run) is not None and not config.start:  # a run that starts from an import has its origin.json
        fix = "was imported, and its weights and tokenizer are not options: train on from it with --start"
        raise UserError("run", str(run), fix)
    found, names = options_of_run(config)
    print(config_text(found, names), end="")
