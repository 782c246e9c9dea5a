"""Defines ``popgate explain``, which says why a pop gets nothing or where a message is, and ``popgate peek``."""

import argparse
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, add_command, number
from popgate.cli.printing import (
    Column,
    JsonObject,
    Output,
    Printer,
    complain,
    duration,
    field,
    output_of,
    visible,
    wants_table,
)
from popgate_client import Client

PAGE_COUNT = 100
SHOWN_DEFAULT = 20
EPILOG = """\
With a group, it says why a pop of the group gets no message: each reason with what helps, the most important first.
With --message-id, it says where this message is in each group of the topic (or in GROUP only). The id is the
publisher's message id, or popgate's own id of one copy. It changes nothing. The proxies know the messages that they
have read for clients: --fetch lets them read some now, as a pop does. RabbitMQ counts this as a delivery; popgate does
not.

examples:
  popgate explain orders billing
  popgate explain orders --message-id order-7
  popgate explain orders --message-id order-7 --fetch
  popgate explain orders billing -o json | jq -r '.reasons[].code'
"""
PEEK_EPILOG = """\
Shows messages that the proxies have in memory, the oldest first, without leasing them. The proxies read messages from
the broker only while clients ask for them: --fetch lets them read some now, as a pop does. RabbitMQ counts this as a
delivery; popgate does not.

examples:
  popgate peek orders billing
  popgate peek orders billing --state leased
  popgate peek orders billing --ordering-key customer-7 --fetch
"""


def _place(row: JsonObject) -> str:
    return "-" if row["place"] is None else str(row["place"])


def _until(row: JsonObject) -> str:
    lease, blocked = row["lease"], row["blocked_by"]
    until = row["visible_at"] if lease is None else lease["deadline"]
    if lease is None and blocked is not None:
        return f"behind {visible(blocked['message_id'] or blocked['id'])}"
    return _left(until)


def _left(until: float | None) -> str:
    return "-" if until is None else f"{duration(max(0.0, until - time.time()))} left"


def _client(row: JsonObject) -> str:
    return "-" if row["lease"] is None else visible(row["lease"]["client"] or "-")


def _body(row: JsonObject) -> str:
    if row["body_bytes"] is None:
        return "(not in memory)"
    text = row["body_preview"]
    return f"(binary, {row['body_bytes']} B)" if text is None else visible(text)


PEEK_COLUMNS = (
    Column("MESSAGE ID", lambda row: visible(row["message_id"] or row["id"]), clips=True),
    Column("QUEUE", field("queue")),
    Column("STATE", field("state")),
    Column("PLACE", _place),
    Column("ATTEMPT", field("attempt")),
    Column("CLIENT", _client),
    Column("UNTIL", _until, clips=True),
    Column("KEY", field("ordering_key")),
    Column("BODY", _body, clips=True),
)


def add_parsers(commands: Commands) -> None:
    """Add the parsers of ``popgate explain`` and ``popgate peek``."""
    parser = add_command(
        commands, "explain", explain, help="say why a pop gets nothing, or where a message is", epilog=EPILOG
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("group", metavar="GROUP", nargs="?", help="needed without --message-id")
    parser.add_argument("--message-id", metavar="ID", help="say where this message is")
    parser.add_argument("--fetch", action="store_true", help="with --message-id: first read messages from the broker")
    peeking = add_command(
        commands, "peek", peek, help="show messages of a group without leasing them", epilog=PEEK_EPILOG
    )
    peeking.add_argument("topic", metavar="TOPIC")
    peeking.add_argument("group", metavar="GROUP")
    peeking.add_argument(
        "--state",
        choices=("ready", "leased", "delayed", "blocked", "any"),
        default="any",
        help="only messages in this state (default: any)",
    )
    peeking.add_argument("--ordering-key", metavar="KEY", help="only messages of this ordering key")
    peeking.add_argument(
        "--max-messages",
        type=number(1),
        default=SHOWN_DEFAULT,
        metavar="N",
        help=f"at most N (default: {SHOWN_DEFAULT})",
    )
    peeking.add_argument("--fetch", action="store_true", help="first read messages from the broker")


def explain(arguments: argparse.Namespace) -> int:
    """Print why a pop of a group gets nothing, or where a message is."""
    if arguments.message_id is not None:
        return _explain_message(arguments)
    if arguments.fetch:
        raise CommandFailed(
            "--fetch needs --message-id; for the messages of a group, use 'popgate peek'", ExitCode.USAGE
        )
    if arguments.group is None:
        raise CommandFailed("name a GROUP, or a message with --message-id ID", ExitCode.USAGE)
    with open_client(arguments) as client:
        answer = client.explain(arguments.topic, arguments.group)
    if not wants_table(arguments):
        _print_json(arguments, answer, answer["reasons"], "code")
        return ExitCode.OK
    name = f"{arguments.group} of {arguments.topic}"
    _say(answer["summary"] if answer["would_get"] else f"A pop of {name} gets nothing now.")
    for reason in answer["reasons"]:
        _say("")
        _say(f"{reason['code']}: {reason['detail']}")
        if reason["queues"] and len(reason["queues"]) < _queue_count(answer):
            _say(f"  queues: {', '.join(map(str, reason['queues']))}")
        if reason["until"] is not None:
            _say(f"  until: {_clock(reason['until'])} ({_left(reason['until'])})")
        _say(f"  what helps: {reason['remedy']}")
    _say("")
    _say(_counts(answer))
    return ExitCode.OK


def _queue_count(answer: JsonObject) -> int:
    standing = answer["standing"]
    return sum(len(proxy["queues"]) for proxy in standing["proxies"]) + len(standing["unowned"])


def _counts(answer: JsonObject) -> str:
    standing: JsonObject = answer["standing"]
    queues: list[JsonObject] = [queue for proxy in standing["proxies"] for queue in proxy["queues"]]
    named = ("ready", "blocked", "leased", "delayed", "moving")
    counts = [f"{sum(queue[name] for queue in queues)} {name}" for name in named]
    unread: list[int | None] = [queue["not_shown"] for queue in queues if queue["exists"]]
    counts.append(f"{'?' if None in unread else sum(count or 0 for count in unread)} at the broker")
    counts.append(f"{'?' if standing['dead'] is None else standing['dead']} dead")
    pops = sum(proxy["parked_pops"] for proxy in standing["proxies"])
    return f"Messages: {', '.join(counts)}. Waiting pops: {pops}."


def _print_json(arguments: argparse.Namespace, answer: JsonObject, parts: list[JsonObject], name: str) -> None:
    """Print the answer, or with ``-o name`` only the names of its parts."""
    output = output_of(arguments)
    columns = (Column(name.upper(), field(name)),)
    Printer(columns, output).print(parts if output is Output.NAME else [answer])


def _explain_message(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        answer = client.find_message(arguments.topic, arguments.message_id, fetch=arguments.fetch)
    groups: list[JsonObject] = answer["groups"]
    if arguments.group is not None:
        groups = [group for group in groups if group["group"] == arguments.group]
        if not groups:
            raise CommandFailed(f"topic {arguments.topic} has no group {arguments.group!r} that you may see")
    if not wants_table(arguments):
        _print_json(arguments, {**answer, "groups": groups}, groups, "group")
        return ExitCode.OK
    for group in groups:
        _say(f"{group['group']}: {group['state']}")
        for copy in group["copies"]:
            _say(f"  {copy['detail']}")
            if copy["dead_letter"] is not None:
                _say(f"  popgate dead-letters show {arguments.topic} {group['group']} {copy['dead_letter']}")
        for sentence in group["because"]:
            _say(f"  {sentence}")
    _say_story(answer.get("story"))
    if not groups:
        _say(f"Topic {arguments.topic} has no group.")
    _complain_of(answer["unreachable"])
    return ExitCode.OK


def _say_story(story: JsonObject | None) -> None:
    if story is None:
        return
    _say("")
    _say("The journal tells:" if story["events"] else "The journal has no event of it yet.")
    for event in story["events"]:
        where = " ".join(str(event[name]) for name in ("group", "client") if event[name] is not None)
        attempt = "" if event["delivery_count"] is None else f", attempt {event['delivery_count']}"
        held = "" if event["held_seconds"] is None else f", after {duration(event['held_seconds'])}"
        detail = f": {event['detail']}" if event["detail"] else ""
        _say(f"  {_clock(event['at'])}  {event['event']}  {where}{attempt}{held}{detail}".rstrip())
    if not story["is_complete"]:
        complain(f"the story may have gaps: {story['trouble']}")


def _say(line: str) -> None:
    print(visible(line))


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def peek(arguments: argparse.Namespace) -> int:
    """Print messages of a group without leasing them."""
    printer = Printer(PEEK_COLUMNS, output_of(arguments))
    shown = 0
    last: JsonObject = {}
    with open_client(arguments) as client:
        for page in _pages(client, arguments):
            printer.print(page["messages"])
            shown += len(page["messages"])
            last = page
    not_shown: int | None = last["not_shown"]
    unreachable: list[JsonObject] = last["unreachable"]
    if last["next"] is not None:
        complain(f"there are more; see them with --max-messages {2 * arguments.max_messages}")
    if not_shown is None:
        complain("the broker does not answer, so it is unknown how many messages wait there")
    elif not_shown:
        hint = "" if arguments.fetch else "; --fetch reads some of them"
        complain(f"{not_shown} more wait at the broker, or are delayed there, and are not in memory{hint}")
    if not shown and not not_shown:
        complain("no such message is in memory")
    _complain_of(unreachable)
    return ExitCode.OK


def _pages(client: Client, arguments: argparse.Namespace) -> Iterator[JsonObject]:
    left: int = arguments.max_messages
    after: str | None = None
    while left > 0:
        page = client.peek(
            arguments.topic,
            arguments.group,
            state=arguments.state,
            key=arguments.ordering_key,
            limit=min(left, PAGE_COUNT),
            after=after,
            fetch=arguments.fetch and after is None,
        )
        yield page
        left -= len(page["messages"])
        after = page["next"]
        if after is None:
            return


def _complain_of(unreachable: list[JsonObject]) -> None:
    for one in unreachable:
        complain(f"proxy {one['proxy']} is missing from this answer: {one['detail']}")
