"""Defines ``popgate ack``, ``release``, ``extend`` and ``reject``, which settle leases by their receipt handles."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, add_command, seconds
from popgate.cli.former_flags import add_former
from popgate.cli.pop import INVISIBILITY_SECONDS_MAX
from popgate.cli.printing import Column, Printer, complain, field, is_quiet, note, output_of
from popgate.cli.reading import Line, LineSource, batches
from popgate_client import SettleEntry, SettleResult, Verb
from popgate_client.causes import ERROR_TEXT_LENGTH_MAX, ERROR_TYPE_LENGTH_MAX, shortened

HANDLE_LINE_BYTES_MAX = 128 * 1024 * 1024
"""Maximum length of an input line in bytes. The limit is high because a line of ``popgate pop`` contains a whole
message with escapes."""
COLUMNS = (Column("STATUS", field("status")), Column("RECEIPT HANDLE", field("receipt_handle")))
EPILOG = """\
Without HANDLE, handles are read from standard input, one per line: plain, or as JSON lines with receipt_handle, as
'popgate pop' prints them. Prints the status of each handle; the exit code is 1 if any lease was not {done}.

examples:
{examples}
"""


class _Command(NamedTuple):
    verb: Verb
    help: str
    done: str
    examples: Sequence[str]


_COMMANDS = (
    _Command(
        Verb.ACK,
        "settle messages: never delivered again",
        "acked",
        (
            "popgate ack orders billing AfT5...",
            "popgate pop orders billing --max-messages 10 | popgate ack orders billing",
        ),
    ),
    _Command(
        Verb.RELEASE,
        "release messages, so that they are visible again",
        "released",
        (
            "popgate release orders billing AfT5...",
            "popgate release orders billing AfT5... --delay-seconds 60 --reason busy",
            'popgate release orders billing AfT5... --error-type Timeout --error-text "$(cat error.txt)"',
        ),
    ),
    _Command(
        Verb.EXTEND,
        "set the time from now after which leases end",
        "extended",
        ("popgate extend orders billing AfT5... --invisibility-seconds 600",),
    ),
    _Command(
        Verb.REJECT,
        "move messages to the dead-letter queue",
        "rejected",
        (
            "popgate reject orders billing AfT5... --reason 'no such customer'",
            "popgate reject orders billing AfT5... --error-type LookupError --error-text 'customer 7 is unknown'",
        ),
    ),
)


def add_parsers(commands: Commands) -> None:
    for verb, help, done, examples in _COMMANDS:
        epilog = EPILOG.format(done=done, examples="\n".join(f"  {example}" for example in examples))
        parser = add_command(commands, verb.value, partial(settle, verb), help=help, epilog=epilog)
        parser.add_argument("topic", metavar="TOPIC")
        parser.add_argument("group", metavar="GROUP")
        parser.add_argument("handles", metavar="HANDLE", nargs="*", help="a receipt handle, as pop prints it")
        if verb is Verb.RELEASE:
            limits = seconds(0, INVISIBILITY_SECONDS_MAX)
            help = "time until the message is visible again (default: from the policy's retry)"
            parser.add_argument("--delay-seconds", type=limits, metavar="SECONDS", help=help)
            add_former(parser, "--delay", "--delay-seconds")
        if verb is Verb.EXTEND:
            limits = seconds(1, INVISIBILITY_SECONDS_MAX)
            parser.add_argument(
                "--invisibility-seconds",
                type=limits,
                metavar="SECONDS",
                required=True,
                help="new length of the lease, from now",
            )
            add_former(parser, "--invisibility", "--invisibility-seconds")
        if verb in (Verb.RELEASE, Verb.REJECT):
            parser.add_argument("--reason", metavar="TEXT", help="the reason, for later inspection")
            _add_cause(parser)


def _add_cause(parser: argparse.ArgumentParser) -> None:
    help = f"type of the error, for the dead letter and 'popgate explain' (cut to {ERROR_TYPE_LENGTH_MAX} characters)"
    parser.add_argument("--error-type", metavar="NAME", help=help)
    help = f"what the error says, for the dead letter (cut to {ERROR_TEXT_LENGTH_MAX} characters)"
    parser.add_argument("--error-text", metavar="TEXT", help=help)
    help = "name of this client in the dead letter (default: that of the pop, if the proxy knows it)"
    parser.add_argument("--client-id", metavar="NAME", help=help)


def settle(verb: Verb, arguments: argparse.Namespace) -> int:
    """Settle leases, and print the results. The exit code is 1 if a lease was not settled as requested, or if a line of
    the input contains no receipt handle."""
    printer = Printer(COLUMNS, output_of(arguments), name=field("receipt_handle"))
    count, all_done = 0, True
    given = vars(arguments)
    with open_client(arguments) as client:
        for handles in _batches(arguments):
            entries = [
                SettleEntry(
                    receipt_handle=handle,
                    delay_seconds=given.get("delay_seconds"),
                    invisibility_seconds=given.get("invisibility_seconds"),
                    reason=given.get("reason"),
                    error_type=shortened(given.get("error_type") or "", ERROR_TYPE_LENGTH_MAX),
                    error_text=shortened(given.get("error_text") or "", ERROR_TEXT_LENGTH_MAX),
                    client_id=given.get("client_id"),
                )
                for handle in handles
                if handle is not None
            ]
            results = client.settle(arguments.topic, arguments.group, verb, entries)
            count += len(handles)
            shown = zip(entries, results, strict=True)
            printer.print(_result_object(*one) for one in shown if not (one[1].ok and is_quiet(arguments)))
            all_done &= all(result.ok for result in results) and None not in handles
    if not count:
        note(arguments, "standard input contained no receipt handles")
    return ExitCode.OK if all_done else ExitCode.FAILED


def _batches(arguments: argparse.Namespace) -> Iterator[list[str | None]]:
    """Yield the receipt handles in batches. None stands for a line without a receipt handle; the user has already been
    told about it."""
    if arguments.handles:
        yield arguments.handles
        return
    if sys.stdin is None:
        raise CommandFailed("standard input is closed; give receipt handles as arguments", ExitCode.USAGE)
    if sys.stdin.isatty():
        complain("reading receipt handles from the terminal; end with Ctrl-D")
    for lines in batches(LineSource(sys.stdin.fileno(), line_bytes_max=HANDLE_LINE_BYTES_MAX)):
        handles = [_handle(line) for line in lines if line.too_long or line.content.strip()]
        if handles:
            yield handles


def _handle(line: Line) -> str | None:
    try:
        text = line.content.decode().strip()
        if text.startswith("{"):
            value: object = json.loads(text)["receipt_handle"]
            if isinstance(value, str):
                return value
        elif text and not line.too_long and " " not in text:
            return text
    except (KeyError, ValueError, RecursionError):
        pass
    complain(f"line {line.number} contains no receipt handle")
    return None


def _result_object(entry: SettleEntry, result: SettleResult) -> dict[str, object]:
    until = {} if result.invisible_until is None else {"invisible_until": result.invisible_until}
    return {"receipt_handle": entry.receipt_handle, "status": result.status, **until}
