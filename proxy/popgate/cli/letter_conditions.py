"""Defines the flags that select dead letters by conditions, and counts the letters that meet them.

The conditions are those of the server (docs/dead-letters.md), which compares the letters. Ages are converted to times
here, with the clock of this machine.
"""

import argparse
import time
from typing import Any

from popgate.cli.connecting import open_client
from popgate.cli.endings import ExitCode
from popgate.cli.flags import Parser, seconds
from popgate.cli.printing import Column, Printer, field, output_of
from popgate_client import Client, PopgateError

COUNT_EPILOG = """\
examples:
  popgate dead-letters count orders billing
  popgate dead-letters count orders billing --client worker-7 --reason timeout
"""
COUNT_COLUMNS = (Column("MATCHING", field("matching")), Column("DEAD", field("dead")))

_TEXTS = {
    "text": "contain TEXT: ids, key, cause, reason, error, client, headers, the first 4 KiB of the body",
    "cause": "have this cause: rejected, max_deliveries, unreadable",
    "reason": "contain TEXT in their reason or last error",
    "client": "were last leased to this client",
    "ordering_key": "have this ordering key",
    "header": "contain TEXT in a header, written as 'name: value'",
}
_FLAGS = {"ordering_key": "ordering-key", "header": "header-text"}
_METAVARS = {"cause": "CAUSE", "client": "CLIENT", "ordering_key": "KEY"}


def add_conditions(parser: Parser, *, message_id: bool = False) -> None:
    """Add the flags. ``message_id``: also one for a single message id, if the command has no such flag of its own."""
    group = parser.add_argument_group("conditions", "only letters that meet all of these")
    for name, what in _TEXTS.items():
        flag = "--" + _FLAGS.get(name, name)
        group.add_argument(flag, dest=name, metavar=_METAVARS.get(name, "TEXT"), help=f"letters that {what}")
    if message_id:
        group.add_argument("--message-id", metavar="ID", help="letters that have this message id")
    group.add_argument(
        "--older-than-seconds", type=seconds(0), metavar="SECONDS", help="letters that were dead-lettered longer ago"
    )
    group.add_argument(
        "--newer-than-seconds", type=seconds(0), metavar="SECONDS", help="letters that were dead-lettered since then"
    )


def conditions_of(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the filter that the flags describe, or None if there are no such flags."""
    given: dict[str, Any] = {name: getattr(arguments, name) for name in _TEXTS}
    if isinstance(arguments.message_id, str):  # otherwise it is a list of ids, which the command handles
        given["message_id"] = arguments.message_id
    now = time.time()
    if arguments.older_than_seconds is not None:
        given["dead_before"] = max(0.0, now - arguments.older_than_seconds)
    if arguments.newer_than_seconds is not None:
        given["dead_after"] = max(0.0, now - arguments.newer_than_seconds)
    return {name: value for name, value in given.items() if value is not None} or None


def without_age(conditions: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the conditions without ``dead_before``, for a request in which the server computes the age."""
    return {name: value for name, value in (conditions or {}).items() if name != "dead_before"} or None


def count_letters(client: Client, topic: str, group: str, conditions: dict[str, Any] | None) -> tuple[int, int]:
    """Return how many dead letters meet the conditions, and how many there are."""
    matching = 0
    after: str | None = None
    while True:
        page = client.dead_letters(topic, group, max_messages=0, after=after, filter=conditions)
        matching += page["matching"]
        after = page.get("next")
        if after is None:
            return matching, page["dead"]


def print_count(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        matching, dead = count_letters(client, arguments.topic, arguments.group, conditions_of(arguments))
    Printer(COUNT_COLUMNS, output_of(arguments)).print([{"matching": matching, "dead": dead}])
    return ExitCode.OK


def counted(arguments: argparse.Namespace, conditions: dict[str, Any] | None) -> str:
    """Say how many dead letters a purge would delete, if this can be counted."""
    try:
        with open_client(arguments) as client:
            matching, dead = count_letters(client, arguments.topic, arguments.group, conditions)
    except PopgateError:
        return "these dead letters"
    return f"{matching} of {dead} dead letters"
