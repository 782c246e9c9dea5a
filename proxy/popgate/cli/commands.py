"""The commands of ``popgate``: one parser for all, and the one place where errors become lines and exit codes."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from popgate import __version__
from popgate.cli import dead_letters, groups, lease_groups, pop, publish, serve, settle, stats, tail, topics
from popgate.cli.connecting import url_of
from popgate.cli.endings import CommandFailed, ExitCode, Terminated, code_of, explain
from popgate.cli.flags import Parser
from popgate.cli.printing import complain
from popgate_client import PopgateError

EPILOG = """\
'popgate COMMAND --help' has examples. The first message:

  popgate serve &
  popgate publish hello 'Hello, world'
  popgate pop hello --ack

Exit codes: 0 done, 1 failed or failed in part, 2 wrong usage, 3 the server can't be reached, 130 Ctrl-C.
"""


def parser() -> Parser:
    """The whole command line."""
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
    publish.add_parser(commands)
    pop.add_parser(commands)
    settle.add_parsers(commands)
    tail.add_parser(commands)
    stats.add_parser(commands)
    topics.add_parser(commands)
    groups.add_parser(commands)
    lease_groups.add_parser(commands)
    dead_letters.add_parsers(commands)
    return root


def run(arguments: Sequence[str]) -> int:
    """Parse and run; the exit code. argparse itself exits with 2 on wrong usage."""
    _prepare_streams()
    parsed = parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except CommandFailed as error:
        complain(error.line)
        return error.code
    except PopgateError as error:
        complain(explain(error, url_of(parsed)))
        return code_of(error)
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


def _prepare_streams() -> None:
    """UTF-8 whatever the locale is, and somewhere to write also where the shell has closed a stream."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _write_nowhere() -> None:
    """What is still buffered must not fail a second time when the interpreter flushes it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
