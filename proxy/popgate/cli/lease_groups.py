"""``popgate lease-groups``: the batches that batch engines hold."""

import argparse

from popgate.cli.connecting import open_client
from popgate.cli.endings import ExitCode
from popgate.cli.flags import Commands, add_command
from popgate.cli.printing import Column, Printer, duration, field, wants_table

EPILOG = """\
One row a lease group that is not acked: its stream and epoch, whether its leases hold (leased) or have run out
(expired), how many messages it has and how many of it went elsewhere, how long the leases still last, and for how long
they have been held without a break.

examples:
  popgate lease-groups orders billing
  popgate lease-groups orders billing --stream nightly-export
"""
COLUMNS = (
    Column("STREAM", field("stream")),
    Column("EPOCH", field("epoch")),
    Column("STATE", field("state")),
    Column("COUNT", field("count")),
    Column("LOST", field("lost")),
    Column("REMAINING", lambda row: duration(row["remaining_seconds"])),
    Column("HELD", lambda row: duration(row["held_seconds"])),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "lease-groups", lease_groups, help="list the batches that batch engines hold", epilog=EPILOG
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("group", metavar="GROUP")
    parser.add_argument("--stream", metavar="NAME", help="only those of one stream")


def lease_groups(arguments: argparse.Namespace) -> int:
    printer = Printer(COLUMNS, as_table=wants_table(arguments))
    with open_client(arguments) as client:
        if arguments.stream is None:
            printer.print(client.lease_groups(arguments.topic, arguments.group))
        else:
            printer.print(client.lease_stream(arguments.topic, arguments.group, arguments.stream).groups())
    return ExitCode.OK
