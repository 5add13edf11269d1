"""The nagjax command. Its verbs are the files of `nagjax/commands/`; their options are the parameters of the functions
that these files define.

A verb's file defines `main`, or lists its subcommands, which are functions, too, in `SUBCOMMANDS`. The first line of
the file's docstring is shown by `nagjax --help`. Importing the file does not import jax, so that help and error
messages appear at once.
"""

import ast
import errno
import importlib
import logging
import os
import signal
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nagjax import __version__
from nagjax.console import silence
from nagjax.discovery import pick
from nagjax.errors import Preempted, UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
LONGEST_LINE = 2000  # characters; an error may quote a longer text from somebody else's file
GO_ON = ("train", "demo", "sweep", "data")  # verbs that continue what an earlier command began
COMMANDS = Path(__file__).parent / "commands"


def verbs() -> dict[str, str]:
    """Every verb with its line of help, read from the files of `nagjax/commands/` without importing them."""
    files = sorted(path for path in COMMANDS.glob("*.py") if path.stem != "__init__")
    docs = {path.stem.rstrip("_"): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    return {verb: (doc or "").split("\n")[0].rstrip(".") for verb, doc in docs.items()}


def functions(verb: str) -> dict[str, Callable]:
    """The functions of a verb, by the words of the command: `{"train": main}`, `{"data prepare": prepare}`. Raises
    UserError for an unknown verb."""
    known = verbs()
    pick("command", verb, known, "commands")
    stem = verb if (COMMANDS / f"{verb}.py").exists() else f"{verb}_"
    module = importlib.import_module(f"nagjax.commands.{stem}")
    several = getattr(module, "SUBCOMMANDS", ())
    return {f"{verb} {f.__name__.rstrip('_')}": f for f in several} if several else {verb: module.main}


def usage() -> str:
    lines = [f"  nagjax {verb:10} {what[:1].lower()}{what[1:]}" for verb, what in verbs().items()]
    ends = ["nagjax COMMAND --help lists its options; nagjax --version. Tab completion: nagjax completion --help"]
    return "\n".join(["usage: nagjax COMMAND [OPTIONS]", "", *lines, "", *ends])


def run(args: Sequence[str]) -> None:
    """Runs one command. Exceptions pass through."""
    if not args or args[0] in ("-h", "--help", "--help-all"):
        print(usage())
        return
    if args[0] == "--version":
        print(f"nagjax {__version__}")
        return
    verb, args = args[0], list(args[1:])
    known = functions(verb)
    words = next(iter(known))
    if " " in words:
        word = args[0] if args else ""
        if word in ("-h", "--help", "--help-all") and len(known) > 1:
            print("\n".join([f"usage: {' | '.join(f'nagjax {name}' for name in known)} [OPTIONS]", "", verbs()[verb]]))
            return
        if word not in ("-h", "--help", "--help-all"):
            words = f"{verb} {word}"
            if words not in known:
                raise UserError(verb, word, f"use: {', '.join(f'nagjax {name}' for name in known)}")
            args = args[1:]
    call(words, known[words], args)


def call(words: str, function: Callable, args: list[str]) -> None:
    """Calls a verb's function with the values of the arguments, or prints its help."""
    from nagjax.arguments import Given, Rest, description, help_text, parameters, parse
    from nagjax.config_file import is_config_file, overridden, read_config_file
    from nagjax.options import COMMON, DEFAULT_SCHEME, RunOptions, own_options, read_options, run_options, taken

    prog, rest = f"nagjax {words}", ()
    fields = {field.name: field for field in parameters(function)}
    if any(field.hint is Rest for field in fields.values()) and "--" in args:
        at = args.index("--")
        args, rest = args[:at], tuple(args[at + 1 :])
    own = own_options(fields.values())
    options = [option for group in own.values() for option in group]
    mine = {option.name for option in options}
    runs = [name for name, field in fields.items() if field.hint is RunOptions]
    file, written = "", {}
    if runs:
        if args and is_config_file(args[0]):
            file, written, args = Path(args[0]).stem, read_config_file(args[0]), args[1:]
        elif args and not args[0].startswith("-") and not any(option.positional for option in options):
            fix = "is not a file of options, NAME.yaml; "
            if prog.split()[-1] == "train":
                fix += f"a run in {args[0]} goes on with its options and --out {args[0]}"
            else:
                fix += f"of a run in {args[0]} nagjax config {args[0]} prints one"
            raise UserError("config", args[0], fix)
        shared = run_options(taken("--scheme", args, written.get("scheme", DEFAULT_SCHEME)))
        of_the_command = mine - {option.name for option in shared}
        if wrong := next((one for one in options if one.name in of_the_command and one.name in written), None):
            fix = f"is not an option of a run, which a file keeps: give {wrong.signature} on the command line"
            raise UserError(wrong.name, written[wrong.name], fix)
        options += [option for option in shared if option.name not in mine]
    if wanted := {"-h", "--help", "--help-all"} & {*args}:
        everything = not runs or "--help-all" in wanted
        named = {option.name for option in options}
        common = [*(o.name for o in options if o.group == "" and o.name not in COMMON), *COMMON]
        shown = [name for name in common if name in named]
        print(help_text(prog, description(function), options, shown, everything))
        return
    values = parse(options, args, prog)
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if field.hint is Given:
            arguments[name] = Given({**written, **values})
        elif field.hint is Rest:
            arguments[name] = rest
        elif field.hint is RunOptions:
            given = {key: value for key, value in values.items() if key not in mine}
            arguments[name] = read_options(overridden(written, given), file)
        elif len(own[name]) == 1 and own[name][0].name == name:
            if name in values:
                arguments[name] = values[name]
        elif own[name]:
            inner = {key.removeprefix(f"{name}."): v for key, v in values.items() if key.startswith(f"{name}.")}
            arguments[name] = typing.cast(Any, field.hint)(**inner)
    function(**arguments)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, also after a run that SIGTERM or SIGHUP asked to end; 2 after one
    line on standard error for bad input; 130 when interrupted; 141 if standard output is closed early."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # silences the libraries' own reports of errors that we report
    try:
        run(sys.argv[1:] if args is None else args)
    except UserError as error:
        return _fail(error)
    except BrokenPipeError:  # nagjax ... | head
        silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno in FULL:
            fix = "free some space"
        elif error.errno in FORBIDDEN:
            fix = "choose a place you may write to"
        elif error.errno is not None and error.filename is not None:  # for example a folder in a file's place
            fix = "repair what is there, or choose another place"
        else:
            raise
        return _fail(UserError("file", error.filename or "(unnamed)", f"{os.strerror(error.errno)}: {fix}"))
    except MemoryError as error:
        return _fail(UserError("memory", str(error), "is more than what is free: make model, batch or context smaller"))
    except KeyboardInterrupt:
        given = sys.argv[1:] if args is None else args
        without = " without --fresh" if "--fresh" in given else ""
        more = f"; the same command{without} goes on where it was" if given and given[0] in GO_ON else ""
        print(f"\nstopped{more}", file=sys.stderr)
        return 130
    except Preempted:
        return 0
    return 0


def _fail(error: Exception) -> int:
    line = "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))
    print(f"nagjax: error: {line if len(line) <= LONGEST_LINE else f'{line[:LONGEST_LINE]}...'}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
