"""Defines the command line of ``popgate`` as a whole. Only this module converts errors to messages and exit codes.

The client library and the client's commands are loaded only if they are needed, so that a proxy starts faster.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from popgate import __version__
from popgate.cli import serve
from popgate.cli.endings import CommandFailed, ExitCode, Terminated
from popgate.cli.flags import Parser
from popgate.cli.former_flags import former_notes
from popgate.cli.printing import complain, note

COMPLETE = "__complete"
"""The command that the scripts of ``popgate completion`` run."""
EPILOG = """\
'popgate COMMAND --help' has examples, and docs/cli.md describes what all commands share. The first message:

  popgate serve &
  popgate publish hello 'Hello, world'
  popgate pop hello --ack

Exit codes: 0 done, 1 failed fully or in part, 2 wrong usage, 3 the server can't be reached, 130 Ctrl-C,
141 the reader of the output has closed it, 143 SIGTERM.
'popgate locks acquire' has the exit code of the command that it runs, 75 if others hold the lock, or 76 if it was lost.
'popgate doctor' has exit code 2 if it could not check.
"""


def parser(*, serve_only: bool = False) -> Parser:
    """Return the parser of the whole command line, or only of ``popgate serve``."""
    root = Parser(
        prog="popgate",
        description="Pop-mode consumption proxy for RabbitMQ, and its client.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"popgate {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    if not serve_only:
        from popgate.cli.client_commands import add_parsers

        add_parsers(commands)
    return root


def run(arguments: Sequence[str]) -> int:
    """Parse the command line and run the command. Return the exit code. If the usage is wrong, argparse exits with code
    2."""
    _prepare_streams()
    first = arguments[0] if arguments else None
    if first == "help":
        arguments = [*arguments[1:], "--help"]
    if first == COMPLETE:
        return _complete(arguments[2:])
    serving = "serve" in arguments[:1]
    parsed = parser(serve_only=serving).parse_args(arguments)
    for line in former_notes(parsed):
        note(parsed, line)
    try:
        code = serve.serve(parsed) if serving else _run_client_command(parsed)
        sys.stdout.flush()
    except CommandFailed as error:
        complain(error.line)
        return error.code
    except BrokenPipeError:
        _write_nowhere()
        return ExitCode.BROKEN_PIPE
    except OSError as error:
        _write_nowhere()
        complain(f"can't write the output: {error.strerror or error}")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Terminated:
        return ExitCode.TERMINATED
    return code


def _run_client_command(parsed: argparse.Namespace) -> int:
    from popgate.cli.client_commands import run_command

    return run_command(parsed)


def _complete(words: Sequence[str]) -> int:
    from popgate.cli.completion import complete

    return complete(parser(), words)


def _prepare_streams() -> None:
    """Make standard output and standard error use UTF-8 in any locale. Replace these streams if the shell has closed
    them."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # open as long as the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115  # open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _write_nowhere() -> None:
    """Discard the buffered output that could not be written. Otherwise writing it would fail again when the interpreter
    exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
