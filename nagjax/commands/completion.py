"""Tab completion for bash and zsh: commands, options and their choices."""

from typing import Annotated, Literal

from nagjax.arguments import POSITIONAL, Given, Option, Rest, expanded, parameters

BASH = """\
_nagjax() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words
  local verb="${COMP_WORDS[1]} ${COMP_WORDS[2]}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "VERBS" -- "$word"))
    return
  fi
  case "$verb $before" in
CHOICES
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "$verb" in
OPTIONS
  esac
  if [ "$COMP_CWORD" -eq 2 ]; then
    case "${COMP_WORDS[1]}" in
SECOND
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _nagjax nagjax
"""


def main(shell: Annotated[Literal["bash", "zsh"], POSITIONAL]) -> None:
    """Print a shell script for tab completion of commands, options and choices. To load it, put
    eval "$(nagjax completion bash)" into ~/.bashrc, or eval "$(nagjax completion zsh)" into ~/.zshrc.

    Args:
        shell: bash or zsh.
    """
    print(("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script(), end="")


def script() -> str:
    """The function that bash calls, with everything written into it: pressing Tab starts no Python."""
    from nagjax.cli import functions, verbs

    commands = {words: every_option(function) for verb in verbs() for words, function in functions(verb).items()}
    second: dict[str, list[str]] = {}
    for words in commands:
        if " " in words:
            second.setdefault(words.split()[0], []).append(words.split()[1])
    options, choices = [], []
    for words, own in commands.items():
        pattern = f'"{words}"*' if " " in words else f'"{words} "*'
        flags = " ".join(flag for option in own for flag in option.flags)
        options.append(f'    {pattern}) words="{flags} --help";;')
        for option in own:
            if option.choices and option.flags:
                choices.append(f'    {pattern}" {option.flags[0]}") words="{" ".join(option.choices)}";;')
    return (
        BASH.replace("VERBS", " ".join([*verbs(), "--help", "--version"]))
        .replace("CHOICES", "\n".join(choices))
        .replace("OPTIONS", "\n".join(options))
        .replace("SECOND", "\n".join(f'      {verb}) words="{" ".join(names)}";;' for verb, names in second.items()))
    )


def every_option(function) -> list[Option]:
    """All options of a command, those of every scheme among them; the scheme's and the preset's names are choices."""
    from nagjax.declared import scheme_names
    from nagjax.model.presets import PRESETS
    from nagjax.options import RunOptions, run_options

    found: dict[str, Option] = {}
    for field in parameters(function):
        if field.hint is RunOptions:
            for scheme in scheme_names():
                found |= {option.name: option for option in run_options(scheme)}
            for name, known in (("scheme", tuple(scheme_names())), ("preset", tuple(PRESETS))):
                found[name] = Option(name, Literal[known], "", found[name].text)
        elif field.hint not in (Given, Rest):
            found |= {option.name: option for option in expanded(field)}
    return list(found.values())
