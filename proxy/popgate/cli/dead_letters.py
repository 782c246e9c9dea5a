"""Defines ``popgate dead-letters``, which shows, redrives and purges the dead letters of a group, and ``popgate
purge``."""

import argparse
import base64
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, Parser, add_command, number
from popgate.cli.former_flags import add_former
from popgate.cli.letter_conditions import COUNT_EPILOG, add_conditions, conditions_of, counted, print_count, without_age
from popgate.cli.printing import (
    Column,
    JsonObject,
    Output,
    Printer,
    complain,
    duration,
    field,
    is_quiet,
    note,
    output_of,
    print_change,
    visible,
    wants_table,
)
from popgate.cli.progress import Progress
from popgate_client import Client

LISTED_DEFAULT = 100
PAGE_COUNT = 256
TABLE_BODY_BYTES = 200
LOOK_SECONDS = 0.3
_DONE, _RUNNING = "done", ("running", "cancelling")

EPILOG = """\
examples:
  popgate dead-letters list orders billing
  popgate dead-letters show orders billing ID
  popgate dead-letters count orders billing --reason timeout
  popgate dead-letters redrive orders billing --rate-per-second 50
  popgate dead-letters status orders billing
  popgate dead-letters cancel orders billing
  popgate dead-letters purge orders billing --older-than-seconds 604800 --yes
"""
LIST_EPILOG = """\
Lists dead letters in the order in which they died. JSON lines have whole bodies unless --body-bytes-max limits them.
The conditions search all dead letters of the group.

examples:
  popgate dead-letters list orders billing
  popgate dead-letters list orders billing --reason timeout --newer-than-seconds 3600
  popgate dead-letters list orders billing --max-messages 1000 --body-bytes-max 0 -o json | jq -r .reason | sort
"""
SHOW_EPILOG = """\
examples:
  popgate dead-letters show orders billing 01a201608cfbc163fe9c4f0000e8f0ce | jq .
"""
REDRIVE_EPILOG = """\
Moves dead letters of this group back to their original queues; with --target-topic, publishes them to another topic.
Without a selection, it moves all letters that exist when it starts. It runs in the proxy: Ctrl-C leaves it running, and
'cancel' ends it. The exit code is 1 if some letters could not be moved.

examples:
  popgate dead-letters redrive orders billing
  popgate dead-letters redrive orders billing --max-messages 1
  popgate dead-letters redrive orders billing --reason timeout --rate-per-second 50
  popgate dead-letters redrive orders billing --message-id order-7 --target-topic orders-repair
  popgate dead-letters redrive orders billing --rate-per-second 50 --no-wait
"""
PURGE_EPILOG = """\
Without --yes, it deletes nothing, and says how many letters it would delete.

examples:
  popgate dead-letters purge orders billing --yes
  popgate dead-letters purge orders billing --cause rejected --header-text 'kind: test'
  popgate dead-letters purge orders billing --older-than-seconds 604800 --yes
"""
PURGE_GROUP_EPILOG = """\
Deletes the visible messages. Leased messages, and those that wait for their retry, stay.

examples:
  popgate purge orders billing --yes
"""


def _body(row: JsonObject) -> str:
    text: str | None = row.get("body")
    if text is None:
        return f"(binary, {row['body_bytes']} B)"
    return visible(text + "..." if row.get("body_is_cut") else text)


def _error(row: JsonObject) -> str:
    error: JsonObject | None = row.get("error")
    if error is None:
        return "-"
    return visible(": ".join(text for text in (error["type"], error["text"]) if text))


def _attempt(row: JsonObject) -> JsonObject:
    """Return one attempt as a row of the table of a dead letter's fields."""
    held = duration(max(0.0, row["ended_at"] - row["leased_at"]))
    told = ": ".join(row[name] for name in ("reason", "error_type", "error_text") if row.get(name))
    by = f" by {row['client']}" if row.get("client") else ""
    ended = datetime.fromtimestamp(row["ended_at"], UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "name": f"attempt {row['attempt']}",
        "value": f"{row['outcome']}{by} at {ended}, after {held}" + (f": {told}" if told else ""),
    }


def _ago(row: JsonObject) -> str:
    at: float | None = row.get("dead_lettered_at")
    return "-" if at is None else duration(max(0.0, time.time() - at))


COLUMNS = (
    Column("ID", field("id")),
    Column("MESSAGE ID", field("message_id")),
    Column("QUEUE", field("source_queue")),
    Column("COUNT", field("delivery_count")),
    Column("DEAD FOR", _ago),
    Column("REASON", lambda row: visible(str(row.get("reason", "-"))), clips=True),
    Column("ERROR", _error, clips=True),
    Column("CLIENT", field("client")),
    Column("BODY", _body, clips=True),
)
REDRIVE_COLUMNS = (
    Column("REDRIVE", field("id")),
    Column("STATE", field("state")),
    Column("TOTAL", field("total")),
    Column("MOVED", field("moved")),
    Column("FAILED", field("failed")),
    Column("TO", field("target_topic", missing="source")),
)
PURGED_COLUMNS = (Column("PURGED", field("purged")),)


def add_parsers(commands: Commands) -> None:
    parser = add_command(
        commands, "dead-letters", _no_action, help="list, redrive and purge the dead letters of a group", epilog=EPILOG
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = _of_group(actions, "list", list_letters, help="list dead letters", epilog=LIST_EPILOG)
    listing.add_argument(
        "--max-messages",
        type=number(1),
        default=LISTED_DEFAULT,
        metavar="N",
        help=f"at most N (default: {LISTED_DEFAULT})",
    )
    listing.add_argument(
        "--body-bytes-max", type=number(0), metavar="N", help="shorten bodies to N bytes; 0 omits them"
    )
    add_former(listing, "--max", "--max-messages")
    add_former(listing, "--body-bytes", "--body-bytes-max")
    add_conditions(listing, message_id=True)
    counting = _of_group(actions, "count", print_count, help="count dead letters", epilog=COUNT_EPILOG)
    add_conditions(counting, message_id=True)
    show = _of_group(actions, "show", show_letter, help="show one dead letter with its whole body", epilog=SHOW_EPILOG)
    show.add_argument("id", metavar="ID", help="as list shows it")
    redrive = _of_group(
        actions, "redrive", redrive_letters, help="move dead letters back to their queues", epilog=REDRIVE_EPILOG
    )
    _add_choice(redrive)
    _add_redrive_flags(redrive)
    _of_group(actions, "status", show_redrive, help="show the progress of the latest redrive", epilog=EPILOG)
    _of_group(actions, "cancel", cancel_redrive, help="cancel the running redrive", epilog=EPILOG)
    purge = _of_group(actions, "purge", purge_letters, help="delete dead letters for good", epilog=PURGE_EPILOG)
    _add_choice(purge)
    add_former(purge, "--older-than", "--older-than-seconds")
    purge.add_argument("--yes", action="store_true", help="confirm: these messages are lost")
    group = _of_group(
        commands, "purge", purge_group, help="delete the visible messages of a group", epilog=PURGE_GROUP_EPILOG
    )
    group.add_argument("--yes", action="store_true", help="confirm: these messages are lost")


def _of_group(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], *, help: str, epilog: str
) -> Parser:
    parser = add_command(commands, name, run, help=help, epilog=epilog)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("group", metavar="GROUP")
    return parser


def _add_choice(parser: Parser) -> None:
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--id", action="append", metavar="ID", help="only this letter, by the id that list shows; may be repeated"
    )
    choice.add_argument(
        "--message-id", action="append", metavar="ID", help="only letters with this message id; may be repeated"
    )
    add_conditions(parser)


def _add_redrive_flags(parser: Parser) -> None:
    parser.add_argument("--max-messages", type=number(1), metavar="N", help="move at most N, the oldest first")
    parser.add_argument("--target-topic", metavar="TOPIC", help="publish them to this topic instead")
    parser.add_argument("--rate-per-second", type=_rate, metavar="N", help="move at most N per second")
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until the redrive has ended (default), or return as soon as it has begun",
    )
    add_former(parser, "--max", "--max-messages")
    add_former(parser, "--to", "--target-topic")
    add_former(parser, "--rate", "--rate-per-second")
    add_former(parser, "--detach", "--no-wait")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 100_000:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 100000, not {text!r}")
    return rate


def _no_action(arguments: argparse.Namespace) -> int:
    raise AssertionError("argparse requires an action")


def list_letters(arguments: argparse.Namespace) -> int:
    output = output_of(arguments)
    limit: int | None = TABLE_BODY_BYTES if output is Output.TABLE else 0 if output is Output.NAME else None
    if arguments.body_bytes_max is not None:
        limit = arguments.body_bytes_max
    printer = Printer(COLUMNS, output)
    left: int = arguments.max_messages
    with open_client(arguments) as client:
        for page in _pages(client, arguments, limit):
            printer.print(page["messages"])
            left -= len(page["messages"])
            if left <= 0 and "next" in page:
                note(arguments, f"there are {page['dead']} dead letters; see more with --max-messages")
    if not printer.count:
        which = "dead letters that meet these conditions" if conditions_of(arguments) else "dead letters"
        note(arguments, f"{arguments.group} of {arguments.topic} has no {which}")
    return ExitCode.OK


def _pages(client: Client, arguments: argparse.Namespace, limit: int | None) -> Iterator[JsonObject]:
    left: int = arguments.max_messages
    conditions = conditions_of(arguments)
    after: str | None = None
    while left > 0:
        page = client.dead_letters(
            arguments.topic,
            arguments.group,
            max_messages=min(left, PAGE_COUNT),
            after=after,
            body_bytes_max=limit,
            filter=conditions,
        )
        yield page
        left -= len(page["messages"])
        after = page.get("next")
        if after is None:
            return


def show_letter(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        letter = client.get_dead_letter(arguments.topic, arguments.group, arguments.id)
    if not wants_table(arguments):
        Printer(COLUMNS, output_of(arguments)).print([letter])
        return ExitCode.OK
    attempts: list[JsonObject] = letter.get("attempts") or []
    fields = {name: value for name, value in letter.items() if name != "attempts"}
    rows: list[JsonObject] = [{"name": name, "value": _shown(name, value)} for name, value in fields.items()]
    rows += [_attempt(row) for row in attempts]
    Printer((Column("FIELD", field("name")), Column("VALUE", field("value"))), as_table=True).print(rows)
    return ExitCode.OK


def _shown(name: str, value: Any) -> str:
    if name == "body_base64":
        return repr(base64.b64decode(value))
    if name == "error":
        return ": ".join(text for text in (value["type"], value["text"]) if text)
    return str(value)


def redrive_letters(arguments: argparse.Namespace) -> int:
    """Start a redrive, and wait until it ends unless --detach is given. The proxy continues the redrive even if this
    command ends earlier."""
    topic, group = arguments.topic, arguments.group
    progress = Progress(sys.stderr, shown=False if is_quiet(arguments) else None, verb="redriven")
    with open_client(arguments) as client:
        try:
            redrive = client.redrive(
                topic,
                group,
                ids=arguments.id,
                message_ids=arguments.message_id,
                filter=conditions_of(arguments),
                max_messages=arguments.max_messages,
                target_topic=arguments.target_topic,
                rate_per_second=arguments.rate_per_second,
                wait_seconds=LOOK_SECONDS if arguments.wait else 0.0,
            )
            started: str = redrive["id"]
            while arguments.wait and redrive["state"] in _RUNNING and redrive["id"] == started:
                progress.tell(redrive["moved"], redrive["failed"])
                time.sleep(LOOK_SECONDS)
                redrive = client.get_redrive(topic, group)
        except KeyboardInterrupt:
            progress.clear()
            complain(f"the redrive continues; cancel it with: popgate dead-letters cancel {topic} {group}")
            raise
        progress.clear()
    if redrive["id"] != started:
        raise CommandFailed("another redrive was started meanwhile; this one has ended")
    print_change(arguments, REDRIVE_COLUMNS, [redrive])
    return _code_of(redrive)


def show_redrive(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        redrive = client.get_redrive(arguments.topic, arguments.group)
    Printer(REDRIVE_COLUMNS, output_of(arguments)).print([redrive])
    return _code_of(redrive)


def cancel_redrive(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        redrive = client.cancel_redrive(arguments.topic, arguments.group)
    print_change(arguments, REDRIVE_COLUMNS, [redrive])
    return ExitCode.OK


def _code_of(redrive: JsonObject) -> int:
    """Print what went wrong in a redrive, and return the exit code."""
    if redrive["trouble"]:
        complain(redrive["trouble"])
    if redrive["not_found"]:
        complain(f"{redrive['not_found']} of the ids do not match a dead letter")
    if redrive["state"] in _RUNNING:
        return ExitCode.OK
    is_whole = redrive["state"] == _DONE and not redrive["failed"] and not redrive["not_found"]
    return ExitCode.OK if is_whole else ExitCode.FAILED


def purge_letters(arguments: argparse.Namespace) -> int:
    conditions = conditions_of(arguments)
    if not arguments.yes:
        which = "these dead letters" if arguments.id or arguments.message_id else counted(arguments, conditions)
        raise CommandFailed(f"purging deletes {which} for good; confirm with --yes", ExitCode.USAGE)
    with open_client(arguments) as client:
        return _purge(
            arguments,
            lambda: client.purge_dead_letters(
                arguments.topic,
                arguments.group,
                ids=arguments.id,
                message_ids=arguments.message_id,
                filter=without_age(conditions),
                older_than_seconds=arguments.older_than_seconds,
            ),
        )


def purge_group(arguments: argparse.Namespace) -> int:
    if not arguments.yes:
        name = f"{arguments.group} of {arguments.topic}"
        raise CommandFailed(f"purging {name} deletes its visible messages for good; confirm with --yes", ExitCode.USAGE)
    with open_client(arguments) as client:
        return _purge(arguments, lambda: client.purge(arguments.topic, arguments.group))


def _purge(arguments: argparse.Namespace, ask: Callable[[], JsonObject]) -> int:
    """Repeat the purge request until the answer says that the purge is complete, and print the total."""
    progress = Progress(sys.stderr, shown=False if is_quiet(arguments) else None, verb="purged")
    answer = ask()
    purged: int = answer["purged"]
    while not answer["complete"]:
        progress.tell(purged, 0)
        answer = ask()
        purged += answer["purged"]
    progress.clear()
    rest = {name: value for name, value in answer.items() if name != "complete"}
    print_change(arguments, PURGED_COLUMNS, [{**rest, "purged": purged}])
    return ExitCode.OK
