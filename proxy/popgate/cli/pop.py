"""Defines ``popgate pop``, which leases messages and prints them."""

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from popgate.cli.connecting import open_client
from popgate.cli.endings import ExitCode
from popgate.cli.flags import Commands, add_command, header, header_filter, number, seconds
from popgate.cli.former_flags import add_former
from popgate.cli.messages import HANDLE_COLUMN, MESSAGE_COLUMNS, popped
from popgate.cli.printing import Printer, complain, field, note, output_of
from popgate_client import Client, LeasedMessage, PopgateError, TooManyInFlight

BATCH_COUNT_MAX = 256
WAIT_SECONDS_MAX = 30.0
INVISIBILITY_SECONDS_MAX = 43_200
EPILOG = """\
Messages are printed as JSON lines with body (or body_base64, for binary data) and receipt_handle. Without --ack they
are redelivered when their leases end, unless they are acked by then. The exit code is 0 even if there were no messages,
or fewer than --max-messages.

With filters, a message must have every named header, with one of the values given for it. --filter compares texts.
--filter-json also compares numbers, true and false, which never equal a text, and null, which means an absent header.

examples:
  popgate pop orders
  popgate pop orders billing --max-messages 100 --wait-seconds 20 | ./handle-them
  popgate pop orders billing --ack -o json | jq -r .body
  popgate pop orders billing --max-messages 10 -o name | popgate ack orders billing
  popgate pop orders billing --filter kind=express --filter kind=urgent
  popgate pop orders billing --filter-json '{"retries": [0, 1], "vip": true, "test": null}'
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "pop", pop, help="lease messages and print them", epilog=EPILOG)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("group", metavar="GROUP", nargs="?", default="default", help="default: default")
    parser.add_argument(
        "--max-messages", type=number(1), default=1, metavar="N", help="print at most N messages (default: 1)"
    )
    parser.add_argument(
        "--wait-seconds",
        type=seconds(0),
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for the first message (default: 0)",
    )
    parser.add_argument(
        "--invisibility-seconds",
        type=seconds(1, INVISIBILITY_SECONDS_MAX),
        metavar="SECONDS",
        help="length of the leases (default: from the subscription's policy)",
    )
    parser.add_argument(
        "--filter",
        type=header,
        action="append",
        default=[],
        metavar="HEADER=VALUE",
        help="only messages with this header, compared as text (repeat it for more headers, or for more values of one)",
    )
    parser.add_argument(
        "--filter-json",
        type=header_filter,
        action="append",
        default=[],
        metavar="JSON",
        help="the same with values of any type: an object, header: value or [values]; null means an absent header",
    )
    parser.add_argument("--client-id", metavar="NAME", help="name of this client in the journal (default: no name)")
    parser.add_argument("--ack", action="store_true", help="ack messages after they are printed")
    add_former(parser, "--max", "--max-messages")
    add_former(parser, "--wait", "--wait-seconds")
    add_former(parser, "--invisibility", "--invisibility-seconds")


def pop(arguments: argparse.Namespace) -> int:
    """Lease and print messages. The exit code is 1 if --ack was given and a message was not acked."""
    columns = MESSAGE_COLUMNS if arguments.ack else (*MESSAGE_COLUMNS, HANDLE_COLUMN)
    printer = Printer(columns, output_of(arguments), name=field("receipt_handle"))
    count, all_acked = 0, True
    with open_client(arguments) as client:
        for messages in _popped(client, arguments):
            count += len(messages)
            if arguments.ack:
                all_acked &= print_and_ack(client, printer, messages)
            else:
                printer.print(map(popped, messages))
    if not count:
        note(arguments, f"no message for {arguments.group} on {arguments.topic}")
    return ExitCode.OK if all_acked else ExitCode.FAILED


def print_and_ack(client: Client, printer: Printer, messages: Sequence[LeasedMessage]) -> bool:
    """Print the messages and ack them. If printing fails, release the messages. Return whether all messages were
    acked."""
    topic, group = messages[0].topic, messages[0].group
    try:
        printer.print(map(popped, messages))
    except BaseException:
        with contextlib.suppress(PopgateError):
            client.release(topic, group, messages, delay_seconds=0.0)
        raise
    failed = [one.status for one in client.ack(topic, group, messages) if not one.ok]
    if failed:
        complain(f"{len(failed)} of {len(messages)} were printed but not acked ({', '.join(sorted(set(failed)))})")
    return not failed


def _popped(client: Client, arguments: argparse.Namespace) -> Iterator[list[LeasedMessage]]:
    """Yield batches of leased messages until ``--max-messages`` is reached or no message is left. Wait up to
    ``--wait-seconds`` for the first message, but not for the others."""
    missing: int = arguments.max_messages
    wanted = _wanted(arguments)
    deadline = time.monotonic() + arguments.wait_seconds
    while missing > 0:
        wait_seconds = min(WAIT_SECONDS_MAX, max(0.0, deadline - time.monotonic()))
        try:
            messages = client.pop(
                arguments.topic,
                arguments.group,
                max_messages=min(missing, BATCH_COUNT_MAX),
                wait_seconds=wait_seconds,
                invisibility_seconds=arguments.invisibility_seconds,
                filter=wanted or None,
                client_id=arguments.client_id,
            )
        except TooManyInFlight as error:
            if missing < arguments.max_messages:
                complain(f"only {arguments.max_messages - missing} messages for now: {error.detail}")
                return
            if time.monotonic() >= deadline:
                raise
            continue  # a single request may not wait any longer
        if messages:
            yield messages
            missing -= len(messages)
            deadline = 0.0
        elif time.monotonic() >= deadline:
            return


def _wanted(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Merge the filter flags. Return, for each header, all values that the flags permit."""
    wanted: dict[str, list[Any]] = {}
    for name, value in arguments.filter:
        wanted.setdefault(name, []).append(value)
    for headers in arguments.filter_json:
        for name, values in headers.items():
            wanted.setdefault(name, []).extend(values)
    return wanted
