"""`unisono completion`: a script that completes this command line in bash, zsh or fish, made from its parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from unisono.cli.arguments import Command

__all__ = ["COMMANDS", "SHELLS", "Option", "ShownCommand", "Values", "read_commands"]

_DESCRIPTION = """\
Print a script that completes the command line of unisono.
"""
_EPILOG = """\
The script knows commands, options, their values, strategies, files and the
names of recorded runs. One line in the start-up file of the shell:

  ~/.bashrc                   eval "$(unisono completion bash)"
  ~/.zshrc, after compinit    eval "$(unisono completion zsh)"
  ~/.config/fish/config.fish  unisono completion fish | source

examples:
  unisono completion bash > ~/.local/share/bash-completion/completions/unisono
  unisono completion fish > ~/.config/fish/completions/unisono.fish
"""
_RUNS = '"${UNISONO_RUNS:-${XDG_STATE_HOME:-$HOME/.local/state}/unisono/runs}"'
_FILES = ("FILE", "FILE.png", "PATH", "JOB.SH", "script.py", "out.safetensors", "SIZE|DIR")
_FOLDERS = ("DIR",)
_STRATEGIES = ("strategy", "strategies", "methods")


class Values(NamedTuple):
    """What may stand in a place: "words", "files", "folders", "runs", "strategies", or "any", which is not known."""

    kind: str
    words: Sequence[str] = ()
    many: bool = False


class Option(NamedTuple):
    """An option; `values` is None if it takes no value."""

    flags: Sequence[str]
    help: str
    values: Values | None


class ShownCommand(NamedTuple):
    """A command, with its options and its positional arguments."""

    name: str
    help: str
    options: Sequence[Option]
    places: Sequence[Values]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SHELLS), help="which shell the script is for")


def _run(options: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from unisono.cli.command_line import make_parser

    print(SHELLS[options.shell](read_commands(make_parser())), end="")
    return 0


# The parsers, read ----------------------------------------------------------------------------------------------------


def read_commands(parser: argparse.ArgumentParser) -> list[ShownCommand]:
    """All commands of the command line, read from its parser."""
    [chosen] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    said = {choice.dest: choice.help or "" for choice in chosen._choices_actions}
    return [_read_command(name, said[name], each) for name, each in chosen.choices.items()]


def _read_command(name: str, said: str, parser: argparse.ArgumentParser) -> ShownCommand:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = [
        Option(action.option_strings, _shorten(action, parser), None if action.nargs == 0 else _read_values(action))
        for action in shown
        if action.option_strings
    ]
    return ShownCommand(name, said, options, [_read_values(action) for action in shown if not action.option_strings])


def _shorten(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """The first clause of an option's help."""
    whole = parser._get_formatter()._expand_help(action) if action.help else ""
    return re.split(r"[;:(]|, (?:see|as in|the same)", whole)[0].strip()


def _read_values(action: argparse.Action) -> Values:
    many = action.nargs in ("*", "+", argparse.REMAINDER)
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices is not None:
        return Values("words", [str(choice) for choice in action.choices], many)
    if action.dest in _STRATEGIES:
        return Values("strategies", many=many)
    if metavar == "RUN":
        return Values("runs", many=many)
    if metavar in _FOLDERS:
        return Values("folders", many=many)
    if metavar in _FILES or action.type is Path or action.nargs == argparse.REMAINDER or action.dest == "checkpoint":
        return Values("files", many=many)
    return Values("any", many=many)


def _list_strategies() -> list[str]:
    """The methods by name; those that begin with an underscore are no methods."""
    package = Path(__file__).parents[1]
    found = {path.stem for folder in ("strategies", "reducers") for path in (package / "methods" / folder).iterdir()}
    return sorted(name for name in found if not name.startswith("_"))


# bash -----------------------------------------------------------------------------------------------------------------


def _write_bash(commands: Sequence[ShownCommand]) -> str:
    names = " ".join(command.name for command in commands)
    cases = "\n".join(line for command in commands for line in _write_bash_cases(command))
    return f"""\
# Completion of unisono for bash: eval "$(unisono completion bash)"
_unisono_runs() {{
    local place={_RUNS}
    printf '%s\\n' last; ls -1 -- "$place" 2>/dev/null
}}
_unisono() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" kind=words words="" head=""
    if [[ $current == "=" ]]; then current=""
    elif [[ $before == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        words="{names} --help --version"
    else
        local place="${{COMP_WORDS[1]}}:$before"
        [[ $current == -* ]] && place="${{COMP_WORDS[1]}}:-"
        case "$place" in
{cases}
        esac
    fi
    case "$kind" in
        files) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;
        folders) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -d -- "$current"); return ;;
        runs)
            [[ $current == */* ]] && {{ mapfile -t COMPREPLY < <(compgen -d -- "$current"); return; }}
            words="$(_unisono_runs)" ;;
        strategies)
            [[ $current == *,* && $current != *"("* ]] && head="${{current%,*}},"
            words="{" ".join(_list_strategies())}"; compopt -o nospace 2>/dev/null ;;
    esac
    mapfile -t COMPREPLY < <(compgen -P "$head" -W "$words" -- "${{current#"$head"}}")
}}
complete -F _unisono unisono
"""


def _write_bash_cases(command: ShownCommand) -> Iterator[str]:
    def write(pattern: str, values: Values) -> str:
        what = f"kind={values.kind}"
        if values.kind in ("words", "any"):
            what = f"words={shlex.quote(' '.join(values.words))}"
        return f"            {pattern}) {what} ;;"

    flags = [flag for option in command.options for flag in option.flags]
    yield write(f"{command.name}:-", Values("words", flags))
    for option in command.options:
        if option.values is not None:
            yield write("|".join(f"{command.name}:{flag}" for flag in option.flags), option.values)
    yield write(f"{command.name}:*", command.places[0] if command.places else Values("words", flags))


# zsh ------------------------------------------------------------------------------------------------------------------


def _write_zsh(commands: Sequence[ShownCommand]) -> str:
    listed = "\n".join(f"            {shlex.quote(f'{_escape(c.name)}:{_escape(c.help)}')}" for c in commands)
    cases = "\n".join(_write_zsh_case(command) for command in commands)
    return f"""\
#compdef unisono
# Completion of unisono for zsh: eval "$(unisono completion zsh)", after compinit
_unisono_runs() {{
    local -a runs=(last ${{(f)"$(ls -1 -- {_RUNS} 2>/dev/null)"}})
    _alternative 'runs:run:compadd -a runs' 'folders:folder:_files -/'
}}
_unisono_strategies() {{
    compset -P '*,'
    compadd -S '' -- {" ".join(_list_strategies())}
}}
_unisono() {{
    if (( CURRENT == 2 )); then
        local -a commands=(
{listed}
        )
        _describe command commands
        _arguments '--help[show this help]' '--version[show the version]'
        return
    fi
    shift words
    (( CURRENT-- ))
    case "$words[1]" in
{cases}
    esac
}}
compdef _unisono unisono
"""


def _write_zsh_case(command: ShownCommand) -> str:
    arguments = []
    for option in command.options:
        value = "" if option.values is None else f":value:{_act_in_zsh(option.values)}"
        others = f"({' '.join(option.flags)})" if len(option.flags) > 1 else ""
        for flag in option.flags:
            either = "=" if value and flag.startswith("--") else ""  # after a space, or after an equals sign
            arguments.append(shlex.quote(f"{others}{flag}{either}[{_escape(option.help)}]{value}"))
    arguments += [shlex.quote(f"{'*' * place.many}:argument:{_act_in_zsh(place)}") for place in command.places]
    lines = " \\\n                ".join(arguments)
    return f"        {command.name})\n            _arguments \\\n                {lines} ;;"


def _act_in_zsh(values: Values) -> str:
    acts = {"files": "_files", "folders": "_files -/", "runs": "_unisono_runs", "strategies": "_unisono_strategies"}
    return f"({' '.join(values.words)})" if values.kind == "words" else acts.get(values.kind, " ")


def _escape(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


# fish -----------------------------------------------------------------------------------------------------------------


def _write_fish(commands: Sequence[ShownCommand]) -> str:
    lines = [
        "# Completion of unisono for fish: unisono completion fish | source",
        "function __unisono_runs",
        "    set -l place $HOME/.local/state/unisono/runs",
        "    set -q XDG_STATE_HOME; and set place $XDG_STATE_HOME/unisono/runs",
        "    set -q UNISONO_RUNS; and set place $UNISONO_RUNS",
        "    echo last; ls -1 $place 2>/dev/null",
        "end",
        "function __unisono_strategies",
        "    set -l before (commandline -ct | string replace -r '^--[^=]*=' '' | string match -r '^.*,')",
        "    set -q before[1]; or set before ''",
        f"    printf '%s\\n' $before{{{','.join(_list_strategies())}}}",
        "end",
        "complete -c unisono -e",
        "complete -c unisono -f",
        "complete -c unisono -n __fish_use_subcommand -l version -d 'show the version'",
    ]
    for command in commands:
        lines.append(f"complete -c unisono -n __fish_use_subcommand -a {command.name} -d {_quote_fish(command.help)}")
        where = f"complete -c unisono -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            flags = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in option.flags)
            value = "" if option.values is None else f" {_act_in_fish(option.values)}"
            lines.append(f"{where} {flags}{value} -d {_quote_fish(option.help)}")
        places = [place for place in command.places[:1] if place.kind != "any"]
        lines += [f"{where} {_act_in_fish(place, option=False)}" for place in places]
    return "\n".join(lines) + "\n"


def _act_in_fish(values: Values, *, option: bool = True) -> str:
    if values.kind == "files":
        return "-r -F" if option else "-F"
    words = {
        "words": " ".join(values.words),
        "runs": "(__unisono_runs)",
        "strategies": "(__unisono_strategies)",
        "folders": "(__fish_complete_directories)",
    }.get(values.kind, "")
    return f"{'-x ' if option else ''}-a {_quote_fish(words)}"


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Sequence[ShownCommand]], str]] = {
    "bash": _write_bash,
    "zsh": _write_zsh,
    "fish": _write_fish,
}


COMMANDS = {"completion": Command(_DESCRIPTION, _EPILOG, _add_arguments, _run)}
