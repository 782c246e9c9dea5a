"""Defines ``popgate cluster``, which shows the proxies of the cluster and the queues that each of them owns."""

import argparse

from popgate.cli.connecting import open_client
from popgate.cli.endings import ExitCode
from popgate.cli.flags import Commands, add_command
from popgate.cli.former_flags import add_former
from popgate.cli.printing import Column, JsonObject, field, note, print_list

EPILOG = """\
Shows one row per proxy, as the asked proxy sees them: its address for the other proxies, the protocol versions that it
supports (all use the highest version that every proxy supports), how many queues it owns, and what the asked proxy has
sent it since its start: its own messages, and clients' requests that it passed on. --show queues shows the queues with
their owners, and the next owners of queues that move.

examples:
  popgate cluster
  popgate cluster --show queues
"""


def _protocol(row: JsonObject) -> str:
    lowest, highest = row["protocol"]["min"], row["protocol"]["max"]
    return str(highest) if lowest == highest else f"{lowest} to {highest}"


def _queues(row: JsonObject) -> str:
    return str(row["queues"]) if row["owns_queues"] else "never"


COLUMNS = (
    Column("PROXY", field("instance")),
    Column("ADDRESS", field("address")),
    Column("PROTOCOL", _protocol),
    Column("QUEUES", _queues),
    Column("ASKED", field("asked")),
    Column("PASSED ON", field("passed_on")),
)
QUEUE_COLUMNS = (
    Column("TOPIC", field("topic")),
    Column("GROUP", field("group")),
    Column("QUEUE", field("queue")),
    Column("ON THE BROKER", field("broker_queue")),
    Column("OWNER", field("owner", missing="none")),
    Column("MOVES TO", field("moves_to")),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "cluster", cluster, help="show the proxies and the owners of the queues", epilog=EPILOG
    )
    parser.add_argument(
        "--show", choices=("proxies", "queues"), default="proxies", help="what the rows are (default: proxies)"
    )
    add_former(parser, "--queues", "--show queues", value="queues")


def cluster(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        status = client.cluster()
    members: list[JsonObject] = status["members"]
    alone = f"proxy {status['instance']} runs alone, and owns all {len(status['queues'])} queues"
    if arguments.show == "queues":
        print_list(arguments, QUEUE_COLUMNS, status["queues"], nothing="no queues", name=field("broker_queue"))
        return ExitCode.OK
    print_list(arguments, COLUMNS, members, nothing=alone)
    if not members:
        return ExitCode.OK
    if status["moving"]:
        note(arguments, f"{status['moving']} queues are moving, or have no owner at the moment")
    spoken = status["protocol"]
    if any(member["protocol"]["max"] > spoken for member in members):
        note(arguments, f"the proxies use protocol version {spoken} until all of them support a higher one")
    return ExitCode.OK
