"""Defines ``popgate stats``, which shows the state of subscriptions, once or repeatedly."""

import argparse
import sys
import time
from collections.abc import Iterator

from popgate.cli.client_errors import explain
from popgate.cli.connecting import open_client, url_of
from popgate.cli.endings import ExitCode
from popgate.cli.flags import Commands, add_command, seconds
from popgate.cli.former_flags import add_former
from popgate.cli.printing import Column, JsonObject, Printer, complain, duration, field, note, output_of
from popgate_client import Client, GroupNotFound, RetryLater, TopicNotFound

CLEAR_SCREEN = "\x1b[H\x1b[2J"
EPILOG = """\
Shows one row per subscription: ready messages, blocked ones among these (behind an earlier message with the same
ordering key), in flight (leased), delayed, dead (in the dead-letter queue), and the age of the oldest message known to
wait. For a single group, its queues follow.

examples:
  popgate stats
  popgate stats orders
  popgate stats orders billing --interval-seconds 2
"""
COLUMNS = (
    Column("TOPIC", field("topic")),
    Column("GROUP", field("group")),
    Column("MODE", field("mode")),
    Column("READY", field("ready")),
    Column("BLOCKED", field("blocked")),
    Column("IN FLIGHT", field("in_flight")),
    Column("DELAYED", field("delayed")),
    Column("DEAD", field("dead")),
    Column("OLDEST", lambda row: duration(row.get("oldest_age_seconds"))),
)
QUEUE_COLUMNS = (
    Column("QUEUE", field("queue")),
    Column("ON THE BROKER", field("broker_queue")),
    Column("READY", field("ready", missing="gone")),
    Column("BLOCKED", field("blocked")),
    Column("IN FLIGHT", field("in_flight")),
    Column("DELAYED", field("delayed")),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "stats", stats, help="show the state of subscriptions", epilog=EPILOG)
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help="default: all topics")
    parser.add_argument("group", metavar="GROUP", nargs="?", help="default: all groups")
    parser.add_argument(
        "--interval-seconds", type=seconds(0.1, 86_400), metavar="SECONDS", help="repeat after this time"
    )
    add_former(parser, "--watch", "--interval-seconds")


def stats(arguments: argparse.Namespace) -> int:
    """Print the state of subscriptions. With --interval-seconds, print it repeatedly until Ctrl-C, even if the
    server is temporarily unreachable."""
    printer = Printer(COLUMNS, output_of(arguments), name=_name)
    every: float | None = arguments.interval_seconds
    clear = CLEAR_SCREEN if printer.as_table and sys.stdout.isatty() else ""
    with open_client(arguments) as client:
        _show(client, printer, arguments, clear if every else "")
        while every:
            time.sleep(every)
            try:
                _show(client, printer, arguments, clear)
            except RetryLater as error:
                complain(explain(error, url_of(arguments)))
    return ExitCode.OK


def _show(client: Client, printer: Printer, arguments: argparse.Namespace, clear: str) -> None:
    rows = list(_rows(client, arguments.topic, arguments.group))
    if clear:
        print(clear, end="")
        printer.start_again()
    printer.print(rows)
    if not rows:
        note(arguments, "no subscriptions; a publish and a pop create one, or: popgate topics create NAME --queues 4")
    if printer.as_table and arguments.group is not None:
        print()
        Printer(QUEUE_COLUMNS, as_table=True).print(rows[0]["queues"])


def _name(row: JsonObject) -> str:
    return f"{row['topic']} {row['group']}"


def _rows(client: Client, topic: str | None, group: str | None) -> Iterator[JsonObject]:
    """Yield one row for each requested subscription.

    If topic and group are given, the subscription must exist. Otherwise, a subscription that has just been deleted is
    skipped.
    """
    if topic is not None and group is not None:
        yield {"topic": topic, "group": group, **client.stats(topic, group)}
        return
    for one in client.list_topics() if topic is None else [client.get_topic(topic)]:
        names: list[str] = one["groups"]
        for name in names:
            try:
                yield {"topic": one["topic"], "group": name, **client.stats(one["topic"], name)}
            except (TopicNotFound, GroupNotFound):
                continue
