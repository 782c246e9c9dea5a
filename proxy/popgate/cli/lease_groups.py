"""Defines ``popgate lease-groups``, which lists the lease groups of batch engines, and settles lease groups that a
batch engine has abandoned."""

import argparse
from dataclasses import asdict

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Command, Commands, Parser, add_command, number, seconds
from popgate.cli.former_flags import add_former
from popgate.cli.pop import INVISIBILITY_SECONDS_MAX
from popgate.cli.printing import Column, JsonObject, complain, duration, field, note, print_change, print_list
from popgate_client import Client, LeaseStream

EPILOG = """\
A batch engine settles its own lease groups. If it hangs or does not come back, 'ack' settles the batches that it has
finished, 'release' returns the others to other clients, and 'extend' keeps them meanwhile.

examples:
  popgate lease-groups list orders billing
  popgate lease-groups ack orders billing nightly-export --through-epoch 17
  popgate lease-groups release orders billing nightly-export --after-epoch 17
"""
LIST_EPILOG = """\
Shows one row per unacked lease group: its stream and epoch, whether its leases are valid (leased), have ended (expired)
or are still being granted (forming), how many messages it has, how many of them were leased by other clients (lost),
how long the leases still last, and how long they have been held without a break.

examples:
  popgate lease-groups list orders billing
  popgate lease-groups list orders billing --stream nightly-export
"""
ACK_EPILOG = """\
Settles every lease group of the stream up to and including this epoch: their messages are never delivered again, and
the engine can't use these epochs again. The exit code is 1 if messages had been leased by other clients, and were not
acked.

examples:
  popgate lease-groups ack orders billing nightly-export --through-epoch 17
"""
EXTEND_EPILOG = """\
Sets the end of the leases of all lease groups of the stream, within the server's --lease-group-seconds-max. The exit
code is 1 if there was no lease group, or if leases had expired: only the engine can lease those again.

examples:
  popgate lease-groups extend orders billing nightly-export --invisibility-seconds 3600
"""
RELEASE_EPILOG = """\
Makes the messages of all later epochs visible again, and forgets these lease groups; -1 means all. An engine that comes
back forms new ones. First ack the epochs that it has finished, or other clients process them again.

examples:
  popgate lease-groups release orders billing nightly-export --after-epoch 17
  popgate lease-groups release orders billing nightly-export --after-epoch -1
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
    listing.add_argument("--stream", metavar="NAME", help="only lease groups of one stream")
    ack = _of_stream(
        actions, "ack", ack_groups, help="settle lease groups; their epochs can't be used again", epilog=ACK_EPILOG
    )
    ack.add_argument(
        "--through-epoch", type=number(0), metavar="EPOCH", required=True, help="this epoch and all earlier ones"
    )
    add_former(ack, "--through", "--through-epoch")
    extend = _of_stream(
        actions, "extend", extend_groups, help="set the time from now after which leases end", epilog=EXTEND_EPILOG
    )
    limits = seconds(1, INVISIBILITY_SECONDS_MAX)
    extend.add_argument(
        "--invisibility-seconds",
        type=limits,
        metavar="SECONDS",
        required=True,
        help="new length of the leases, from now",
    )
    add_former(extend, "--invisibility", "--invisibility-seconds")
    release = _of_stream(
        actions, "release", release_groups, help="return the messages of lease groups", epilog=RELEASE_EPILOG
    )
    release.add_argument(
        "--after-epoch", type=number(-1), metavar="EPOCH", required=True, help="all epochs after this one; -1: all"
    )
    add_former(release, "--after", "--after-epoch")


def _of_stream(actions: Commands, name: str, run: Command, *, help: str, epilog: str) -> Parser:
    parser = add_command(actions, name, run, help=help, epilog=epilog)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("group", metavar="GROUP")
    parser.add_argument("stream", metavar="STREAM")
    return parser


def _name(row: JsonObject) -> str:
    return f"{row['stream']} {row['epoch']}"


def _no_action(arguments: argparse.Namespace) -> int:
    raise AssertionError("argparse requires an action")


def list_groups(arguments: argparse.Namespace) -> int:
    topic, group, stream = arguments.topic, arguments.group, arguments.stream
    with open_client(arguments) as client:
        rows = client.lease_groups(topic, group) if stream is None else _stream(client, arguments).groups()
    nothing = f"{group} of {topic} has no lease groups{'' if stream is None else f' of stream {stream}'}"
    print_list(arguments, COLUMNS, rows, nothing=nothing, name=_name)
    return ExitCode.OK


def ack_groups(arguments: argparse.Namespace) -> int:
    """Acknowledge lease groups. The exit code is 1 if other clients had already leased some of the messages."""
    with open_client(arguments) as client:
        acked = _stream(client, arguments).ack(arguments.through_epoch)
    print_change(arguments, ACKED_COLUMNS, [asdict(acked)])
    if acked.lost:
        complain(f"{acked.lost} messages had been leased by other clients and were not acked")
        return ExitCode.FAILED
    if not acked.acked and not acked.already_acked:
        note(arguments, f"stream {arguments.stream} had nothing to ack through epoch {arguments.through_epoch}")
    return ExitCode.OK


def extend_groups(arguments: argparse.Namespace) -> int:
    """Extend the leases of a stream's lease groups. The exit code is 1 if the stream has no lease group, or if one has
    expired."""
    with open_client(arguments) as client:
        extended = _stream(client, arguments).extend(arguments.invisibility_seconds)
    if not extended:
        raise CommandFailed(f"stream {arguments.stream} has no lease group to extend")
    print_change(arguments, EXTENDED_COLUMNS, extended)
    return ExitCode.OK if all(one["status"] == "extended" for one in extended) else ExitCode.FAILED


def release_groups(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        released = _stream(client, arguments).release(arguments.after_epoch)
    print_change(arguments, RELEASED_COLUMNS, [{"released": released}])
    if not released:
        note(arguments, f"stream {arguments.stream} had nothing to release after epoch {arguments.after_epoch}")
    return ExitCode.OK


def _stream(client: Client, arguments: argparse.Namespace) -> LeaseStream:
    return client.lease_stream(arguments.topic, arguments.group, arguments.stream)
