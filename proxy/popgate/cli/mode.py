"""Defines ``popgate mode``, which shows or switches the consume mode of a group: pop or pull."""

import argparse
import sys
import time

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, add_command, seconds
from popgate.cli.former_flags import add_former
from popgate.cli.printing import (
    Column,
    JsonObject,
    complain,
    duration,
    field,
    is_quiet,
    print_change,
    print_list,
)
from popgate.cli.progress import Progress
from popgate_client import Client

DRAIN_SECONDS_MAX = 43_200
LOOK_SECONDS = 0.3
EPILOG = """\
Without a mode, it shows the present one, and whether all proxies serve it. A switch waits until they do, unless
--no-wait is given; Ctrl-C ends the wait, not the switch.

A switch to pull first drains the group: pops are refused, leases can be settled, and after --drain-timeout-seconds
(60) the remaining leases are cut off and their messages are redelivered. A switch to pop takes effect at once, and
uncommitted messages of pull clients are redelivered; with --drain-timeout-seconds, the clients have that time to commit
them. During a drain you can switch back to the former mode, which cuts off nothing.

examples:
  popgate mode orders billing
  popgate mode orders billing pull --dry-run
  popgate mode orders billing pull --drain-timeout-seconds 300
  popgate mode orders billing pop
"""


def _drain(name: str) -> Column:
    titles = {"leases_left": "LEASES LEFT", "seconds_left": "TIME LEFT"}

    def cell(row: JsonObject) -> str:
        if row["drain"] is None:
            return "-"
        left = row["drain"][name]
        return duration(left) if name == "seconds_left" else str(left)

    return Column(titles[name], cell)


def _behind(row: JsonObject) -> str:
    behind = [proxy["proxy"] for proxy in row["proxies"] if not proxy["converged"]]
    return f"all but {', '.join(behind)}" if behind else f"all {len(row['proxies'])}"


COLUMNS = (
    Column("TOPIC", field("topic")),
    Column("GROUP", field("group")),
    Column("MODE", field("mode")),
    Column("WANTED", field("wanted")),
    Column("GENERATION", field("generation")),
    _drain("leases_left"),
    _drain("seconds_left"),
    Column("SERVED BY", _behind),
)
PREVIEW_COLUMNS = (
    Column("MODE", field("mode")),
    Column("THEN", lambda row: ", ".join(row["preview"]["steps"]) or "nothing to do"),
    Column("DRAIN TIMEOUT", lambda row: duration(row["preview"]["drain_timeout_seconds"])),
    Column("WAITING POPS", lambda row: str(row["preview"]["pollers"])),
    Column("PULL CLIENTS", lambda row: str(row["preview"]["pull_clients"])),
    Column("LEASES", lambda row: str(row["preview"]["leases"])),
    Column("QUEUES", lambda row: str(len(row["preview"]["queues"]))),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "mode", show_or_switch, help="show how a group is consumed, or switch it", epilog=EPILOG
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("group", metavar="GROUP")
    parser.add_argument("mode", nargs="?", choices=("pop", "pull"), help="the mode to switch to")
    parser.add_argument(
        "--drain-timeout-seconds",
        type=seconds(0, DRAIN_SECONDS_MAX),
        metavar="SECONDS",
        help="how long leases have to end before they are cut off",
    )
    add_former(parser, "--drain-timeout", "--drain-timeout-seconds")
    parser.add_argument("--dry-run", action="store_true", help="only report what would happen")
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until all proxies serve the new mode (default), or return as soon as the switch has begun",
    )


def show_or_switch(arguments: argparse.Namespace) -> int:
    topic, group, mode = arguments.topic, arguments.group, arguments.mode
    if mode is None and (arguments.dry_run or arguments.drain_timeout_seconds is not None):
        raise CommandFailed("name the mode to switch to: pop or pull", ExitCode.USAGE)
    with open_client(arguments) as client:
        answer: JsonObject
        if mode is None:
            answer = client.consume_mode(topic, group)
        elif arguments.dry_run:
            answer = client.set_consume_mode(
                topic, group, mode, drain_timeout_seconds=arguments.drain_timeout_seconds, dry_run=True
            )
        else:
            try:
                answer = client.set_consume_mode(
                    topic, group, mode, drain_timeout_seconds=arguments.drain_timeout_seconds
                )
                if arguments.wait:
                    answer = _waited_for(client, answer, is_quiet=is_quiet(arguments))
            except KeyboardInterrupt:  # the switch may have begun before the answer arrived
                back = "pop" if mode == "pull" else "pull"
                complain(f"the switch continues; undo it with: popgate mode {topic} {group} {back}")
                raise
    columns = PREVIEW_COLUMNS if arguments.dry_run else COLUMNS
    if mode is None or arguments.dry_run:
        print_list(arguments, columns, [answer], name=field("mode"))
    else:
        print_change(arguments, columns, [answer], name=field("mode"))
    return ExitCode.OK


def _waited_for(client: Client, answer: JsonObject, *, is_quiet: bool) -> JsonObject:
    """Wait until all proxies serve the requested mode, and return the last answer.

    Raises: CommandFailed if another client requests another mode in the meantime.
    """
    topic, group, wanted = answer["topic"], answer["group"], answer["wanted"]
    progress = Progress(sys.stderr, shown=False if is_quiet else None)
    try:
        while not answer["converged"]:
            drain = answer["drain"]
            if drain is None:
                progress.say(f"{answer['mode']}, served by {_behind(answer)}")
            else:
                progress.say(f"draining: {drain['leases_left']:,} leases left, {duration(drain['seconds_left'])}")
            time.sleep(LOOK_SECONDS)
            answer = client.consume_mode(topic, group)
            if answer["wanted"] != wanted:
                raise CommandFailed(f"another client has switched it back to {answer['wanted']} meanwhile")
    finally:
        progress.clear()
    return answer
