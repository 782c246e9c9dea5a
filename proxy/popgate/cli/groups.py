"""Defines ``popgate groups``, which shows and changes the groups of a topic and their policies."""

import argparse
from collections.abc import Callable
from typing import Any

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, add_command, number, seconds
from popgate.cli.former_flags import add_former
from popgate.cli.printing import Column, JsonObject, complain, duration, field, note, print_change, print_list

EPILOG = """\
examples:
  popgate groups list orders
  popgate groups create orders billing --invisibility-seconds 60 --max-deliveries 5
  popgate groups policy orders billing --retry-initial-seconds 1 --retry-max-seconds 300
  popgate groups pause orders billing
  popgate groups resume orders billing
  popgate groups delete orders billing --yes
"""
POLICY_EPILOG = """\
Settings that are not named keep their values, or get their defaults in a new group. A retry delays a message after its
lease has expired, or after a release without a delay: by --retry-initial-seconds at first, then by --retry-multiplier
times the previous delay each time.

examples:
  popgate groups create orders billing --invisibility-seconds 60
  popgate groups policy orders billing
  popgate groups policy orders billing --max-deliveries never
"""
DELETE_EPILOG = """\
Deletes the group with its messages and dead letters. Adopted queues remain unchanged.

examples:
  popgate groups delete orders billing --yes
"""


def _policy(read: Callable[[JsonObject], str]) -> Callable[[JsonObject], str]:
    return lambda row: read(row["policy"])


def _retry(policy: JsonObject) -> str:
    retry: JsonObject = policy["retry"]
    if not retry["initial_seconds"]:
        return "at once"
    return f"{duration(retry['initial_seconds'])} x{retry['multiplier']:g} up to {duration(retry['max_seconds'])}"


COLUMNS = (
    Column("TOPIC", field("topic")),
    Column("GROUP", field("group")),
    Column("MODE", field("mode")),
    Column("INVISIBILITY", _policy(lambda policy: duration(policy["invisibility_seconds"]))),
    Column("MAX LEASE", _policy(lambda policy: duration(policy["max_lease_seconds"]))),
    Column("MAX DELIVERIES", _policy(field("max_deliveries", missing="never"))),
    Column("RETRY", _policy(_retry)),
    Column("MAX IN FLIGHT", _policy(field("max_in_flight", missing="any"))),
    Column("MIN REPLICAS", _policy(field("min_replicas", missing="-"))),
    Column("PAUSED", _policy(lambda policy: "yes" if policy["paused"] else "no")),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "groups", _no_action, help="list, create, change and delete the groups of a topic", epilog=EPILOG
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = add_command(actions, "list", list_groups, help="list the groups of a topic", epilog=EPILOG)
    listing.add_argument("topic", metavar="TOPIC")
    for name, run, help in (
        ("create", put_group, "create a group, or change its policy"),
        ("policy", show_or_change_policy, "show the policy of a group, or change it"),
    ):
        parser = add_command(actions, name, run, help=help, epilog=POLICY_EPILOG)
        parser.add_argument("topic", metavar="TOPIC")
        parser.add_argument("group", metavar="GROUP")
        _add_policy_flags(parser)
    for name, run, help in (
        ("pause", pause_group, "stop handing out messages; leases can be settled"),
        ("resume", resume_group, "hand out messages again"),
    ):
        parser = add_command(actions, name, run, help=help, epilog=EPILOG)
        parser.add_argument("topic", metavar="TOPIC")
        parser.add_argument("group", metavar="GROUP")
    delete = add_command(actions, "delete", delete_group, help="delete a group", epilog=DELETE_EPILOG)
    delete.add_argument("topic", metavar="TOPIC")
    delete.add_argument("group", metavar="GROUP")
    delete.add_argument("--yes", action="store_true", help="confirm: its messages are lost")


def _add_policy_flags(parser: argparse.ArgumentParser) -> None:
    policy = parser.add_argument_group("policy")
    policy.add_argument("--invisibility-seconds", type=seconds(1), metavar="SECONDS", help="length of a lease")
    policy.add_argument(
        "--max-lease-seconds", type=seconds(1), metavar="SECONDS", help="maximum age of an extended lease"
    )
    policy.add_argument(
        "--max-deliveries",
        type=_count_or("never"),
        metavar="N|never",
        help="number of deliveries after which a message is dead-lettered",
    )
    policy.add_argument(
        "--max-in-flight", type=_count_or("any"), metavar="N|any", help="maximum number of leases at a time"
    )
    policy.add_argument(
        "--min-replicas",
        type=_count_or("unset", 0),
        metavar="N|unset",
        help="replicas of its queues for a replica keeper to maintain (RabbitMQ only)",
    )
    policy.add_argument(
        "--retry-initial-seconds", type=seconds(0), metavar="SECONDS", help="delay after the first delivery"
    )
    policy.add_argument("--retry-multiplier", type=seconds(1), metavar="FACTOR", help="factor by which the delay grows")
    policy.add_argument("--retry-max-seconds", type=seconds(0), metavar="SECONDS", help="maximum delay")
    for former in ("--invisibility", "--max-lease", "--retry-initial", "--retry-max"):
        add_former(policy, former, f"{former}-seconds")


def _count_or(word: str, minimum: int = 1) -> Callable[[str], int | str]:
    def parse(text: str) -> int | str:
        return text if text == word else number(minimum)(text)

    return parse


def _no_action(arguments: argparse.Namespace) -> int:
    raise AssertionError("argparse requires an action")


def list_groups(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        names: list[str] = client.get_topic(arguments.topic)["groups"]
        rows = [client.get_group(arguments.topic, name) for name in names]
    nothing = f"{arguments.topic} has no groups; create one with: popgate groups create {arguments.topic} NAME"
    print_list(arguments, COLUMNS, rows, nothing=nothing, name=field("group"))
    return ExitCode.OK


def put_group(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        group = client.put_group(arguments.topic, arguments.group, **_policy_change(arguments))
    _warn(group)
    print_change(arguments, COLUMNS, [group], name=field("group"))
    return ExitCode.OK


def show_or_change_policy(arguments: argparse.Namespace) -> int:
    """Show a group's policy, or change it if flags with new values are given. Unlike in the HTTP interface, an unknown
    group is an error. Raises: TopicNotFound, GroupNotFound."""
    with open_client(arguments) as client:
        group = client.get_group(arguments.topic, arguments.group)
        if change := _policy_change(arguments):
            group = client.put_group(arguments.topic, arguments.group, **change)
            _warn(group)
    if change:
        print_change(arguments, COLUMNS, [group], name=field("group"))
    else:
        print_list(arguments, COLUMNS, [group], name=field("group"))
    return ExitCode.OK


def _warn(group: JsonObject) -> None:
    warnings: list[str] = group.get("warnings", [])  # older servers send no warnings
    for warning in warnings:
        complain(f"warning: {warning}")


def pause_group(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        group = client.pause_group(arguments.topic, arguments.group)
    print_change(arguments, COLUMNS, [group], name=field("group"))
    return ExitCode.OK


def resume_group(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        group = client.resume_group(arguments.topic, arguments.group)
    print_change(arguments, COLUMNS, [group], name=field("group"))
    return ExitCode.OK


def delete_group(arguments: argparse.Namespace) -> int:
    name = f"{arguments.group} of {arguments.topic}"
    if not arguments.yes:
        raise CommandFailed(f"deleting {name} also deletes its messages; confirm with --yes", ExitCode.USAGE)
    with open_client(arguments) as client:
        client.delete_group(arguments.topic, arguments.group)
    note(arguments, f"deleted {name}")
    return ExitCode.OK


def _policy_change(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the policy for which flags were given, in the form of the HTTP interface."""
    change: dict[str, Any] = {}
    if arguments.invisibility_seconds is not None:
        change["invisibility_seconds"] = arguments.invisibility_seconds
    if arguments.max_lease_seconds is not None:
        change["max_lease_seconds"] = arguments.max_lease_seconds
    if arguments.max_deliveries is not None:
        change["max_deliveries"] = None if arguments.max_deliveries == "never" else arguments.max_deliveries
    if arguments.max_in_flight is not None:
        change["max_in_flight"] = None if arguments.max_in_flight == "any" else arguments.max_in_flight
    if arguments.min_replicas is not None:
        change["min_replicas"] = None if arguments.min_replicas == "unset" else arguments.min_replicas
    retry = {
        "initial_seconds": arguments.retry_initial_seconds,
        "multiplier": arguments.retry_multiplier,
        "max_seconds": arguments.retry_max_seconds,
    }
    if named := {name: value for name, value in retry.items() if value is not None}:
        change["retry"] = named
    return change
