"""That no scheme is without its equation in float64."""

import ast
from pathlib import Path

from nagjax.residual.registry import own_schemes

HERE = Path(__file__).parent
FILES = ("equations", "equations_elsewhere", "several_lanes", "single_stream", "step_sizes")


def words(path: Path) -> set[str]:
    """A file's names and strings, of strings such as `mix_ln-all` what is before the dash."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    strings = {str(node.value).partition("-")[0] for node in nodes if isinstance(node, ast.Constant)}
    return strings | {node.id for node in nodes if isinstance(node, ast.Name)}


def test_every_scheme_has_one():
    known = set().union(*(words(HERE / f"test_{name}.py") for name in FILES))
    own = own_schemes()
    missing = [name for name, scheme in own.items() if not {name, scheme.__name__} & known]
    assert len(own) > 20 and not missing, (
        f"no equation in float64 of {missing}: add it to a table in one of the files {', '.join(FILES)} beside this one"
    )
