"""Defines ``popgate completion``, which prints a script for a shell, and answers that script's questions.

The scripts are short and know nothing of the commands: at each completion they run ``popgate __complete -- WORDS``,
which reads the candidates from the parser, and names of topics, groups and locks from the proxy. It prints one
candidate in each line, with a description after a tab, or ``:file`` if the shell is to complete a path.
"""

import argparse
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from popgate.cli.endings import ExitCode
from popgate.cli.flags import COMMANDS, Commands, Parser, add_plain_command
from popgate.cli.former_flags import FormerFlag
from popgate.cli.known_names import GROUPS, LOCKS, TOPICS, known_names

SECONDS_MAX = 2
"""Maximum seconds of a completion. A proxy that does not answer must not block the shell."""
FILE = ":file"
PATHS = ("FILE", "FOLDER", "PATH")
DESCRIPTION_LENGTH_MAX = 60
EPILOG = """\
The candidates come from this popgate: commands, flags and values, and the names of topics, groups and locks from the
proxy at --url, POPGATE_URL or the default address.

Install it for one user:

  bash   popgate completion bash > ~/.local/share/bash-completion/completions/popgate
         (or, without the package bash-completion, in ~/.bashrc:  source <(popgate completion bash))
  zsh    popgate completion zsh > "${fpath[1]}/_popgate"
         (or, in ~/.zshrc after compinit:  source <(popgate completion zsh))
  fish   popgate completion fish > ~/.config/fish/completions/popgate.fish

examples:
  popgate completion bash > ~/.local/share/bash-completion/completions/popgate
"""
BASH = """\
# popgate: completion for bash, made by 'popgate completion bash'
_popgate() {
    local line current="${COMP_WORDS[COMP_CWORD]}"
    [ "$current" = "=" ] && current=""
    COMPREPLY=()
    while IFS= read -r line; do
        if [ "$line" = ":file" ]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$current")
        else
            COMPREPLY+=("${line%%$'\\t'*}")
        fi
    done < <("${COMP_WORDS[0]}" __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _popgate popgate
"""
ZSH = """\
#compdef popgate
# popgate: completion for zsh, made by 'popgate completion zsh'
_popgate() {
    local line
    local -a candidates
    while IFS= read -r line; do
        if [[ "$line" == ":file" ]]; then
            _files
            return
        fi
        line="${line//:/\\\\:}"
        candidates+=("${line/$'\\t'/:}")
    done < <("${words[1]}" __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    _describe popgate candidates
}
if [ "$funcstack[1]" = "_popgate" ]; then
    _popgate
else
    compdef _popgate popgate
fi
"""
FISH = """\
# popgate: completion for fish, made by 'popgate completion fish'
function __popgate_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in ($words[1] __complete -- $words[2..-1] "$current" 2>/dev/null)
        if test "$line" = ":file"
            __fish_complete_path "$current"
        else
            echo $line
        end
    end
end
complete -c popgate -f -a '(__popgate_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_parser(commands: Commands) -> None:
    parser = add_plain_command(commands, "completion", "print a script that completes command lines in a shell", EPILOG)
    parser.add_argument("shell", choices=SCRIPTS, help="the shell")
    parser.set_defaults(run=print_script)


def print_script(arguments: argparse.Namespace) -> int:
    print(SCRIPTS[arguments.shell], end="")
    return ExitCode.OK


def complete(root: Parser, words: Sequence[str]) -> int:
    """Print the candidates for the last one of the words, which follow ``popgate`` on the command line."""
    signal.alarm(SECONDS_MAX)  # ends the process
    *before, current = words or [""]
    place, current = _place(root, before, current)
    for candidate in _candidates(place, current):
        print(candidate)
    return ExitCode.OK


@dataclass(slots=True)
class _Place:
    """Where the word to complete stands: in which command, and after which arguments."""

    parser: Parser
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    """The values before it, by the names of their actions."""
    positionals: int = 0
    waiting: argparse.Action | None = None
    """The flag whose value it is."""
    prefix: str = ""
    """The part of the word before the value: ``--flag=``."""
    only_positionals: bool = False


def _place(root: Parser, before: Sequence[str], current: str) -> tuple[_Place, str]:
    """Return the place of the word ``current``, and the part of it to complete. bash gives ``--flag=value`` as three
    words."""
    place = _Place(root)
    for word in before:
        _pass(place, word)
    if current == "=" and place.waiting is not None:
        return place, ""
    flag, equals, value = current.partition("=")
    action = place.parser.action_of(flag)  # argparse has no public way
    if place.waiting is None and equals and action is not None:
        place.waiting, place.prefix = action, f"{flag}="
        return place, value
    return place, current


def _pass(place: _Place, word: str) -> None:
    waiting = place.waiting
    flag, equals, value = word.partition("=")
    action = None if place.only_positionals else place.parser.action_of(flag)
    if waiting is not None and waiting.nargs == argparse.REMAINDER:
        return
    if word == "=" and waiting is not None:
        return
    if waiting is not None and action is None:
        place.given[waiting.dest] = word
        place.waiting = waiting if waiting.nargs == "+" else None
    elif word == "--":
        place.waiting, place.only_positionals = None, True
    elif action is not None:
        place.waiting = None if equals or action.nargs == 0 else action
        if equals:
            place.given[action.dest] = value
    else:
        _pass_positional(place, word)


def _pass_positional(place: _Place, word: str) -> None:
    positional = _positional(place)
    if isinstance(positional, COMMANDS):
        below = place.parser.subcommands().get(word)
        if below is not None:
            place.parser, place.positionals = below, 0
    elif positional is not None:
        place.given[positional.dest] = word
        place.positionals += positional.nargs != "*"


def _positional(place: _Place) -> argparse.Action | None:
    actions = [action for action in place.parser.all_actions() if not action.option_strings]
    return actions[place.positionals] if place.positionals < len(actions) else None


def _candidates(place: _Place, current: str) -> Iterator[str]:
    """Yield the lines for the shell."""
    action = place.waiting or _positional(place)
    if place.waiting is None and current.startswith("-") and not place.only_positionals:
        yield from _flags(place.parser, current)
    elif action is None:
        return
    elif action.metavar in PATHS or action.nargs == argparse.REMAINDER:
        yield FILE
    else:
        yield from (f"{place.prefix}{name}" for name in _values(place, action) if name.startswith(current))


def _flags(parser: Parser, current: str) -> Iterator[str]:
    for action in parser.all_actions():
        if action.help == argparse.SUPPRESS or isinstance(action, FormerFlag):
            continue
        for flag in action.option_strings:
            if flag.startswith(current) and (flag.startswith("--") or current == flag):
                yield _described(flag, action.help)


def _values(place: _Place, action: argparse.Action) -> Iterator[str]:
    if isinstance(action, COMMANDS):
        yield from (_described(name, one.description) for name, one in place.parser.subcommands().items())
    elif action.choices is not None:
        yield from map(str, action.choices)
    elif action.metavar == "TOPIC" or action.dest in ("topic", "target_topic"):
        yield from known_names(_arguments(place), TOPICS)
    elif action.dest == "group":
        yield from known_names(_arguments(place), GROUPS)
    elif action.dest == "name" and place.parser.prog.startswith("popgate locks"):
        yield from known_names(_arguments(place), LOCKS)


def _arguments(place: _Place) -> argparse.Namespace:
    """Return what is known of the parsed arguments: the address of the proxy, and the topic."""
    known = ("url", "token_file", "topic")
    return argparse.Namespace(**{name: value for name, value in place.given.items() if name in known})


def _described(name: str, text: str | None) -> str:
    return f"{name}\t{' '.join((text or '').split())[:DESCRIPTION_LENGTH_MAX]}".rstrip("\t")
