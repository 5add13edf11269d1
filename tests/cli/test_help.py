"""Every verb explains itself, every option has a text, and help and refusals import no jax."""

import subprocess
import sys
from pathlib import Path

import pytest

from nagjax import __version__
from nagjax.cli import functions as functions_of
from nagjax.cli import main, usage, verbs
from nagjax.commands.completion import every_option, script
from nagjax.declared import SCHEMES, scheme_fields
from nagjax.options import COMMON

FUNCTIONS = {words: function for verb in verbs() for words, function in functions_of(verb).items()}

OWN_SCHEMES = sorted(path.stem for path in SCHEMES.glob("*.py") if path.stem != "__init__")

HEAVY = {"jax", "flax", "optax", "orbax", "grain", "matplotlib", "pallas_kernels"}
WITHOUT = """
import sys
from nagjax.cli import main
for args in {commands}:
    code = main(args)
    assert code == {code}, (args, code)
    loaded = [name for name in {heavy} if name in sys.modules]
    assert not loaded, (args, loaded)
"""

REFUSED = [
    "tarin", "train --dpeth 3", "train --scheme nga", "train --preset 7T", "train --lr abc", "train --clip -1",
    "train --beta2 2", "train --z-loss nan", "train --seed 18446744073709551616", "train --scheme.ramp 1.5",
    "train --scheme lns --scheme.ramp 0.1", "train --rope-base 0", "train --mod.skip none", "train --mod.rate 1",
    "train --width 96 --heads 7", "train --mesh.fsdp 0", "train --hosts.count 0", "train --start x",
    "train --data.workers 300", "train --batch 10 --accumulate 3", "train x", "eval", "eval a b",
    "eval a --batches 0",
    "generate a --top-p 2", "compare", "data", "data perpare", "data prepare", "data prepare x --out y --validation 1",
    "data prepare x --out y -- --beam",
    "tokenizer train x --out y --vocab 3", "plan", "plan --topology v5e:3x3", "calibrate x --rates a,b",
    "calibrate x --rise nan", "map", "import x", "export x --format y", "diagnose x --batches 0", "prune x y",
    "prune x --out y --blocks 0",
    "profile --traced 0", "bench", "bench stp", "bench mod --rate 0", "demo --context 3", "demo --schemes nag nag",
    "completion fish", "info x --depth 3", "generate x --prompt", "generate x --slide --speed",
    "eval x --limit 3", "eval x --fewshot 2", "eval x --tasks t.jsonl --batches 2", "eval x --tasks t.jsonl --data y",
    "prune x --out y --curve --count 2", "prune x --out y --curve --lr 1", "prune x --out y --blocks 1 --rule late",
    "plan --topology v5e:4x4 --tries 3", "plan --topology v5e:4x4 --mfu 0.5",
]  # fmt: skip


def python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_help_imports_no_jax():
    commands = [[], ["--help"], ["--version"], *([*words.split(), "--help"] for words in FUNCTIONS)]
    commands += [["train", "--help-all", "--scheme", "review"], ["data", "--help"], ["bench", "--help"]]
    python(WITHOUT.format(commands=commands, code=0, heavy=HEAVY))


def test_a_package_without_jax_is_imported_without_jax():
    python(f"import sys\nfrom nagjax import data, options\nassert not {HEAVY} & sys.modules.keys()")


def test_a_refused_command_imports_no_jax():
    python(WITHOUT.format(commands=[command.split() for command in REFUSED], code=2, heavy=HEAVY))


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_is_one_line(command, capsys):
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("nagjax: error: ") and error.count("\n") == 1


@pytest.mark.parametrize("words", FUNCTIONS)
def test_every_command_explains_itself(words, capsys):
    assert main([*words.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: nagjax {words}" in out and "None" not in out.split("\n")[2]


@pytest.mark.parametrize("words", FUNCTIONS)
def test_every_option_has_a_text(words):
    for option in every_option(FUNCTIONS[words]):
        assert len(option.text) > 1 and not option.text.endswith("."), option
        assert option.text.count("(") == option.text.count(")"), option


def test_a_file_in_commands_is_a_verb(tmp_path, monkeypatch, capsys):
    (tmp_path / "hello.py").write_text('"""Say hello."""\n')
    monkeypatch.setattr("nagjax.cli.COMMANDS", tmp_path)
    assert verbs() == {"hello": "Say hello"} and "nagjax hello      say hello" in usage()


def test_help_shows_what_people_use_and_help_all_the_rest(capsys):
    shown = {}
    for flag in ("--help", "--help-all"):
        assert main(["train", flag, "--scheme", "review"]) == 0
        lines = capsys.readouterr().out.split("\n")
        shown[flag] = [line.split()[0] for line in lines if line.startswith("  --")]
    assert 18 <= len(shown["--help"]) <= 26 and len(set(shown["--help-all"])) == len(shown["--help-all"]) > 80
    assert {"--scheme.rank", "--hosts.count", "--block.rope.factor"} <= set(shown["--help-all"]) - set(shown["--help"])
    assert {f"--{name.replace('_', '-')}" for name in COMMON} <= set(shown["--help"])


def test_help_in_a_narrow_window(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    assert main(["info", "--help"]) == 0 and "--help" in capsys.readouterr().out


def test_of_an_option_given_twice_the_last_counts(capsys):
    assert main(["train", "--help-all", "--scheme", "nag", "--scheme=review"]) == 0
    assert "--scheme.rank" in (told := capsys.readouterr().out) and "--scheme.ramp" not in told


def test_texts_stand_at_their_own_option(capsys):
    assert main(["train", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--mod.skip attention,mlp|attention|mlp kinds of sublayers" in text
    assert "--attention auto|xla|cudnn|splash|tokamax implementation of attention" in text
    assert text.count("recomputed in the backward") == 1
    assert "--beta2 NUMBER decay of the mean of the gradients' squares (default 0.95; at least 0 and below 1)" in text


def test_texts_name_their_quantity():
    """A text is read alone: it must not begin as if the option's name were part of its sentence."""
    for words, function in FUNCTIONS.items():
        for option in every_option(function):
            assert option.text.split()[0] not in ("of", "by", "on", "from", "times", "that"), (words, option.name)
    for name in OWN_SCHEMES:
        for field in scheme_fields(name):
            assert field.text.split()[0] not in ("of", "by", "on", "from", "times", "that"), (name, field.name)


def test_a_choice_that_says_nothing_by_itself_is_explained():
    (rule,) = (o for o in every_option(FUNCTIONS["prune"]) if o.name == "rule")
    assert all(f"{choice}: " in rule.text for choice in rule.choices)
    (shell,) = every_option(FUNCTIONS["completion"])
    assert all(choice in shell.text for choice in shell.choices)


def test_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"nagjax {__version__}\n"


@pytest.mark.parametrize(
    "typed, found",
    [
        ("nagjax tr", {"train"}),
        ("nagjax train --mesh.f", {"--mesh.fsdp"}),
        ("nagjax train --scheme hyper", {"hyper_connections"}),
        ("nagjax train --depth 3 --schedule w", {"wsd"}),
        ("nagjax bench m", {"mod"}),
        ("nagjax bench mod --rou", {"--rounds", "--router"}),
        ("nagjax data prepare --runner ", {"local", "beam"}),
        ("nagjax train --scheme.ran", {"--scheme.rank"}),
    ],
)
def test_completion(typed, found, tmp_path):
    words = typed.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _nagjax; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    file = tmp_path / "ask.sh"
    file.write_text(script() + ask)
    done = subprocess.run(["bash", str(file)], capture_output=True, text=True)
    assert set(done.stdout.split()) == found, done.stderr


def test_completion_is_a_command(capsys):
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == "autoload -U +X bashcompinit && bashcompinit\n" + script()
    assert Path(__file__).parents[2].joinpath("docs", "getting_started.md").read_text().count("nagjax completion") > 0


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m nagjax.cli train --help-all | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == "usage: nagjax train [OPTIONS]\n" and done.stderr == ""
