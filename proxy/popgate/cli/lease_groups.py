"""``popgate lease-groups``: lists the batches that batch engines hold, and settles those that an engine left behind."""

import argparse
from dataclasses import asdict

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Command, Commands, Parser, add_command, number, seconds
from popgate.cli.pop import INVISIBILITY_SECONDS_MAX
from popgate.cli.printing import Column, Printer, complain, duration, field, wants_table
from popgate_client import Client, LeaseStream

EPILOG = """\
A batch engine settles its own lease groups. Where it is stuck or will not come back: 'ack' settles the batches that it
has finished, 'release' gives the others to other clients, 'extend' keeps them meanwhile.

examples:
  popgate lease-groups list orders billing
  popgate lease-groups ack orders billing nightly-export --through 17
  popgate lease-groups release orders billing nightly-export --after 17
"""
LIST_EPILOG = """\
One row a lease group that is not acked: its stream and epoch, whether its leases hold (leased), have run out (expired)
or are still being given (forming), how many messages it has and how many of it went elsewhere, how long the leases
still last, and for how long they have been held without a break.

examples:
  popgate lease-groups list orders billing
  popgate lease-groups list orders billing --stream nightly-export
"""
ACK_EPILOG = """\
Settles every lease group of the stream through this epoch: its messages never come again, and the engine can't use
these epochs again. The exit code is 1 where messages had gone elsewhere and were not acked.

examples:
  popgate lease-groups ack orders billing nightly-export --through 17
"""
EXTEND_EPILOG = """\
Lets the leases of all lease groups of the stream end that long from now, but holds none longer than the server's
--lease-group-seconds-max allows. The exit code is 1 where there was none, or leases had run out before: only the engine
can lease those again.

examples:
  popgate lease-groups extend orders billing nightly-export --invisibility 3600
"""
RELEASE_EPILOG = """\
Makes the messages of every later epoch visible again, and forgets these lease groups; -1 means all. An engine that
comes back forms new ones. Ack first what it has finished, or others do that again.

examples:
  popgate lease-groups release orders billing nightly-export --after 17
  popgate lease-groups release orders billing nightly-export --after -1
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
ACKED_COLUMNS = (
    Column("ACKED", field("acked")),
    Column("ALREADY ACKED", field("already_acked")),
    Column("LOST", field("lost")),
)
EXTENDED_COLUMNS = (
    Column("EPOCH", field("epoch")),
    Column("STATUS", field("status")),
    Column("COUNT", field("count")),
    Column("LOST", field("lost")),
    Column("REMAINING", lambda row: duration(row["remaining_seconds"])),
)
RELEASED_COLUMNS = (Column("RELEASED", field("released")),)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "lease-groups", _no_action, help="list and settle the batches that batch engines hold", epilog=EPILOG
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = add_command(actions, "list", list_groups, help="list lease groups", epilog=LIST_EPILOG)
    listing.add_argument("topic", metavar="TOPIC")
    listing.add_argument("group", metavar="GROUP")
    listing.add_argument("--stream", metavar="NAME", help="only those of one stream")
    ack = _of_stream(
        actions, "ack", ack_groups, help="settle lease groups, and their epochs for good", epilog=ACK_EPILOG
    )
    ack.add_argument("--through", type=number(0), metavar="EPOCH", required=True, help="this epoch and all before it")
    extend = _of_stream(
        actions, "extend", extend_groups, help="make leases end that many seconds from now", epilog=EXTEND_EPILOG
    )
    limits = seconds(1, INVISIBILITY_SECONDS_MAX)
    extend.add_argument("--invisibility", type=limits, metavar="SECONDS", required=True, help="from now on")
    release = _of_stream(
        actions, "release", release_groups, help="give the messages of lease groups back", epilog=RELEASE_EPILOG
    )
    release.add_argument("--after", type=number(-1), metavar="EPOCH", required=True, help="all later epochs")


def _of_stream(actions: Commands, name: str, run: Command, *, help: str, epilog: str) -> Parser:
    parser = add_command(actions, name, run, help=help, epilog=epilog)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("group", metavar="GROUP")
    parser.add_argument("stream", metavar="STREAM")
    return parser


def _no_action(arguments: argparse.Namespace) -> int:
    raise AssertionError("argparse requires an action")


def list_groups(arguments: argparse.Namespace) -> int:
    printer = Printer(COLUMNS, as_table=wants_table(arguments))
    with open_client(arguments) as client:
        if arguments.stream is None:
            printer.print(client.lease_groups(arguments.topic, arguments.group))
        else:
            printer.print(_stream(client, arguments).groups())
    return ExitCode.OK


def ack_groups(arguments: argparse.Namespace) -> int:
    """Settle lease groups. Exit code 1 if messages were lost to other clients before."""
    with open_client(arguments) as client:
        acked = _stream(client, arguments).ack(arguments.through)
    Printer(ACKED_COLUMNS, as_table=wants_table(arguments)).print([asdict(acked)])
    if acked.lost:
        complain(f"{acked.lost} messages had gone elsewhere and were not acked")
        return ExitCode.FAILED
    if not acked.acked and not acked.already_acked:
        complain(f"stream {arguments.stream} had nothing to ack through epoch {arguments.through}")
    return ExitCode.OK


def extend_groups(arguments: argparse.Namespace) -> int:
    """Extend lease groups. Exit code 1 if there are none, or if one has expired."""
    with open_client(arguments) as client:
        extended = _stream(client, arguments).extend(arguments.invisibility)
    if not extended:
        raise CommandFailed(f"stream {arguments.stream} has no lease group to extend")
    Printer(EXTENDED_COLUMNS, as_table=wants_table(arguments)).print(extended)
    return ExitCode.OK if all(one["status"] == "extended" for one in extended) else ExitCode.FAILED


def release_groups(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        released = _stream(client, arguments).release(arguments.after)
    Printer(RELEASED_COLUMNS, as_table=wants_table(arguments)).print([{"released": released}])
    if not released:
        complain(f"stream {arguments.stream} had nothing to release after epoch {arguments.after}")
    return ExitCode.OK


def _stream(client: Client, arguments: argparse.Namespace) -> LeaseStream:
    return client.lease_stream(arguments.topic, arguments.group, arguments.stream)
