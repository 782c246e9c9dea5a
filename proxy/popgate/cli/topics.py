"""Defines ``popgate topics``, which lists, creates, adopts and deletes topics."""

import argparse
from typing import Any

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, add_command, number
from popgate.cli.printing import Column, JsonObject, complain, field, note, print_change, print_list, visible

EPILOG = """\
examples:
  popgate topics
  popgate topics list -o name
  popgate topics create orders --queues 8
  popgate topics create orders --adopt orders-eu orders-us
  popgate topics delete orders --yes
"""
CREATE_EPILOG = """\
An adopted queue and its publishers remain unchanged, but no other application may consume it. --unique-message-ids
declares that no two messages on it share a message_id: popgate's leases and acks then also survive its own crashes.

examples:
  popgate topics create orders --queues 8
  popgate topics create orders --adopt orders-eu orders-us --unique-message-ids
"""
DELETE_EPILOG = """\
Deletes the topic with its groups and their messages. Adopted queues remain unchanged.

examples:
  popgate topics delete orders --yes
"""


def _adopted(row: JsonObject) -> str:
    return visible(", ".join(row["adopted"])) or "-"


def _groups(row: JsonObject) -> str:
    return visible(", ".join(row["groups"])) or "-"


COLUMNS = (
    Column("TOPIC", field("topic")),
    Column("QUEUES", field("queues")),
    Column("ADOPTED", _adopted, clips=True),
    Column("GROUPS", _groups, clips=True),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "topics", list_topics, help="list, create, adopt and delete topics", epilog=EPILOG)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    add_command(actions, "list", list_topics, help="list all topics (also without an action)", epilog=EPILOG)
    create = add_command(actions, "create", create_topic, help="create a topic, or change it", epilog=CREATE_EPILOG)
    create.add_argument("topic", metavar="NAME")
    form = create.add_mutually_exclusive_group(required=True)
    form.add_argument("--queues", type=number(1), metavar="N", help="use N queues of its own")
    form.add_argument("--adopt", nargs="+", metavar="QUEUE", help="use these existing RabbitMQ queues")
    create.add_argument(
        "--unique-message-ids", action="store_true", help="the messages of the adopted queues have unique message_ids"
    )
    delete = add_command(actions, "delete", delete_topic, help="delete a topic", epilog=DELETE_EPILOG)
    delete.add_argument("topic", metavar="NAME")
    delete.add_argument("--yes", action="store_true", help="confirm: its messages are lost")


def list_topics(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        topics = client.list_topics()
    print_list(arguments, COLUMNS, topics, nothing="no topics; create one with: popgate topics create NAME --queues 4")
    return ExitCode.OK


def create_topic(arguments: argparse.Namespace) -> int:
    """Create a topic, adopt existing queues as a topic, or change the number of a topic's queues, which must be
    drained."""
    settings: dict[str, Any] = {"queues": arguments.queues} if arguments.queues else {"adopt": arguments.adopt}
    if arguments.unique_message_ids:
        if not arguments.adopt:
            raise CommandFailed("--unique-message-ids is for adopted queues; give --adopt", ExitCode.USAGE)
        settings["unique_message_ids"] = True
    with open_client(arguments) as client:
        topic = client.put_topic(arguments.topic, **settings)
    warnings: list[str] = topic["warnings"]
    for warning in warnings:
        complain(f"warning: {warning}")
    print_change(arguments, COLUMNS, [topic])
    return ExitCode.OK


def delete_topic(arguments: argparse.Namespace) -> int:
    if not arguments.yes:
        raise CommandFailed(f"deleting {arguments.topic} also deletes its messages; confirm with --yes", ExitCode.USAGE)
    with open_client(arguments) as client:
        client.delete_topic(arguments.topic)
    note(arguments, f"deleted {arguments.topic}")
    return ExitCode.OK
