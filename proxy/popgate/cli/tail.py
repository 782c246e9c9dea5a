"""Defines ``popgate tail``, which prints the messages of a topic. It uses a separate group, so that other groups are
not affected.

Without --group, this group is created at the start and deleted at the end, even after Ctrl-C, SIGTERM or SIGHUP (a
closed terminal). Only after SIGKILL, the group remains.
"""

import argparse
import contextlib
import secrets
import signal
import sys
from collections.abc import Generator
from types import FrameType

from popgate.cli.connecting import open_client
from popgate.cli.endings import ExitCode, Terminated
from popgate.cli.flags import Commands, add_command, number
from popgate.cli.former_flags import add_former
from popgate.cli.messages import MESSAGE_COLUMNS
from popgate.cli.pop import BATCH_COUNT_MAX, print_and_ack
from popgate.cli.printing import Printer, complain, field, note, output_of, reader_gone
from popgate_client import Client, Forbidden, GroupNotFound, PopgateError, TopicNotFound, Unauthorized

LOOK_AROUND_SECONDS = 2.0
"""Maximum seconds that a pop waits. After each pop without messages, ``tail`` checks whether its output still has a
reader."""
EPILOG = """\
Prints each message that is published from now on, until Ctrl-C. A temporary group named tail-... gets its own copy of
every message, so other groups are not affected; it is deleted at the end. With --group NAME the group stays, and a
later tail continues where this one ended; messages of that group are consumed. A topic on adopted queues has only one
group, so it can't be followed.

examples:
  popgate tail orders
  popgate tail orders -o json | jq -r .body
  popgate tail orders --max-messages 10
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "tail", tail, help="follow a topic without disturbing its groups", epilog=EPILOG)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("--group", metavar="NAME", help="follow as this group, and keep the group")
    parser.add_argument("--max-messages", type=number(1), metavar="N", help="end after N messages")
    add_former(parser, "--max", "--max-messages")


def tail(arguments: argparse.Namespace) -> int:
    """Print the messages of a topic until a signal arrives, --max-messages is reached, or the reader of the output has
    closed it."""
    printer = Printer(MESSAGE_COLUMNS, output_of(arguments), name=field("receipt_handle"))
    with open_client(arguments) as client, _group(client, arguments) as group:
        if sys.stdout.isatty():
            note(arguments, f"following {arguments.topic} as group {group}; Ctrl-C ends")
        return _follow(client, printer, arguments.topic, group, arguments.max_messages)


def _follow(client: Client, printer: Printer, topic: str, group: str, count_max: int | None) -> int:
    count, all_acked = 0, True
    while count_max is None or count < count_max:
        wanted = BATCH_COUNT_MAX if count_max is None else min(BATCH_COUNT_MAX, count_max - count)
        messages = client.pop(topic, group, max_messages=wanted, wait_seconds=LOOK_AROUND_SECONDS)
        if messages:
            all_acked &= print_and_ack(client, printer, messages)
            count += len(messages)
        elif reader_gone():
            return ExitCode.BROKEN_PIPE
    return ExitCode.OK if all_acked else ExitCode.FAILED


@contextlib.contextmanager
def _group(client: Client, arguments: argparse.Namespace) -> Generator[str, None, None]:
    """Create the group that consumes the topic, and yield its name. A temporary group is deleted at the end, except
    after SIGKILL."""
    kept: str | None = arguments.group
    group = kept or f"tail-{secrets.token_hex(4)}"
    with _terminable():
        try:
            try:
                client.put_group(arguments.topic, group)
            except (Forbidden, Unauthorized):
                kept = group  # nothing was created, so nothing can be left
                raise
            yield group
        finally:
            if kept is None:
                _delete(arguments, group)


def _delete(arguments: argparse.Namespace, group: str) -> None:
    topic: str = arguments.topic
    try:
        with open_client(arguments) as client:  # a signal may have left the other one unusable
            client.delete_group(topic, group)
    except (GroupNotFound, TopicNotFound):
        pass  # the group was never created, or was deleted with its topic
    except BaseException as error:
        if isinstance(error, PopgateError) and error.code == "conflict":
            return
        complain(f"the temporary group may be left; delete it with: popgate groups delete {topic} {group} --yes")
        if not isinstance(error, PopgateError):
            raise


@contextlib.contextmanager
def _terminable() -> Generator[None, None, None]:
    """Within the context, raise Terminated when SIGTERM arrives, or SIGHUP unless it is ignored (nohup)."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, terminate) for one in numbers}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
