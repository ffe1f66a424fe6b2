"""`gaudi-spec completion`: what a shell needs to complete our commands and options, written from the parser itself."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

DESCRIPTION = """\
Print a script that completes commands, options and their values. Load it in your shell's start-up file:

  bash   source <(gaudi-spec completion bash)
  zsh    source <(gaudi-spec completion zsh)
  fish   gaudi-spec completion fish | source

Exit status: 0 when it was printed, 2 for another shell.
"""
_PROGRAM = "gaudi-spec"


class _Option(NamedTuple):
    names: tuple[str, ...]
    """Empty for a positional argument."""
    choices: tuple[str, ...]
    takes_value: bool
    help: str


class _Command(NamedTuple):
    name: str
    help: str
    options: tuple[_Option, ...]


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description=DESCRIPTION,
    )
    parser.add_argument("shell", choices=sorted(_SHELLS), help="your shell")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    print(_SHELLS[options.shell](list(_commands(options.parser))), end="")
    return 0


def _commands(parser: argparse.ArgumentParser) -> Iterator[_Command]:
    (action,) = (found for found in parser._actions if isinstance(found, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
    for name, command in action.choices.items():
        yield _Command(name, helps[name], tuple(_option(found) for found in command._actions))


def _option(action: argparse.Action) -> _Option:
    choices = tuple(map(str, action.choices or ()))
    return _Option(tuple(action.option_strings), choices, action.nargs != 0, (action.help or "").replace("%%", "%"))


def _words(command: _Command) -> list[str]:
    """What may follow the command anywhere: its options, and values of positional arguments."""
    return [text for option in command.options for text in option.names or option.choices]


# ---- shells ----------------------------------------------------------------------------------------------


def _bash(commands: list[_Command]) -> str:
    cases = []
    for command in commands:
        inner = [
            f"      {command.name}:{f'|{command.name}:'.join(option.names)})"
            f" words={shlex.quote(' '.join(option.choices))} ;;"
            for option in command.options
            if option.names and option.choices
        ]
        files = [f"{command.name}:{name}" for option in command.options for name in option.names if _is_open(option)]
        if files:
            inner.append(f'      {"|".join(files)}) COMPREPLY=($(compgen -f -- "$current")); return ;;')
        inner.append(f"      {command.name}:*) words={shlex.quote(' '.join(_words(command)))} ;;")
        cases += inner
    names = shlex.quote(" ".join(command.name for command in commands))
    lines = [
        "_gaudi_spec() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words',
        f'  if [ "$COMP_CWORD" -le 1 ]; then words={names}; else',
        '    case "${COMP_WORDS[1]}:$before" in',
        *cases,
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "  # a folder or file where none of our words fits",
        '  [ "${#COMPREPLY[@]}" -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))',
        "}",
        f"complete -o filenames -F _gaudi_spec {_PROGRAM}",
    ]
    return "\n".join(lines) + "\n"


def _is_open(option: _Option) -> bool:
    """Whether it takes a value from no list: often a file."""
    return option.takes_value and not option.choices


def _zsh(commands: list[_Command]) -> str:
    lines = (
        # Where nothing loaded the shell's own completion yet; -i passes over folders of others, and asks nothing.
        "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }",
        "autoload -Uz bashcompinit && bashcompinit",
    )
    return "".join(f"{line}\n" for line in lines) + _bash(commands)


def _fish(commands: list[_Command]) -> str:
    begin = f"complete -c {_PROGRAM}"
    lines = [
        f"{begin} -n __fish_use_subcommand -f -a {command.name} -d {_fish_quoted(command.help)}" for command in commands
    ]
    for command in commands:
        here = f"{begin} -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            values = f" -x -a {_fish_quoted(' '.join(option.choices))}" if option.choices else ""
            if not option.names:
                lines += [f"{here}{values.replace(' -x', ' -f')}"] if option.choices else []
                continue
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            needs = " -r" if _is_open(option) else ""
            lines.append(f"{here} {names}{values or needs} -d {_fish_quoted(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", " ") + "'"


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
