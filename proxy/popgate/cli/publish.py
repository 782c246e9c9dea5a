"""Defines ``popgate publish``, which sends messages from arguments or standard input in batches."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, add_command, header, seconds
from popgate.cli.former_flags import add_former
from popgate.cli.intake import numbered_batches
from popgate.cli.printing import Column, JsonObject, Printer, is_quiet, note, output_of, visible
from popgate.cli.printing import field as column_field
from popgate.cli.progress import Progress
from popgate.cli.sending import BatchResult, Numbered, Pipeline, Refusal, send
from popgate_client import PopgateError

INTERRUPT_PATIENCE_SECONDS = 2.0
DELAY_SECONDS_MAX = 2_592_000
TTL_SECONDS_MAX = 31_536_000
EPILOG = """\
Without BODY, every line of standard input is a message. Batches are sent in parallel: only messages with the same
ordering key keep their order. Every message that was not published is printed with its number; the summary goes to
standard error, with the message id if there was one message. Exit code 0 means that all messages are on stable
storage.

examples:
  popgate publish orders hello
  popgate publish orders 'hello' 'world' --header source=shell --ordering-key customer-7
  tail -f access.log | popgate publish log-lines
  popgate publish reminders 'pay' --delay-seconds 3600 --ttl-seconds 86400
  popgate publish images --whole --message-id cat.png < cat.png
  popgate publish orders 'order 17' --dedup-id order-17    (again soon after: a duplicate, not stored twice)
  echo '{"body":"hello","headers":{"n":1},"ordering_key":"k"}' | popgate publish orders --json-lines
"""
REFUSAL_COLUMNS = (
    Column("NUMBER", column_field("number")),
    Column("MESSAGE ID", column_field("message_id")),
    Column("CODE", lambda row: row["error"]["code"]),
    Column("DETAIL", lambda row: visible(row["error"]["detail"]), clips=True),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "publish", publish, help="publish messages from arguments or standard input", epilog=EPILOG
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("bodies", metavar="BODY", nargs="*", help="the body of one message")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--whole", action="store_true", help="standard input is the body of one message, text or binary")
    form.add_argument(
        "--json-lines",
        action="store_true",
        help="every line is an object: body or body_base64, headers, message_id, ordering_key, dedup_id, "
        "delay_seconds, ttl_seconds",
    )
    parser.add_argument(
        "--header", dest="headers", type=header, action="append", default=[], metavar="NAME=VALUE", help="repeatable"
    )
    parser.add_argument("--ordering-key", metavar="KEY", help="messages with the same key keep their order")
    parser.add_argument("--message-id", metavar="ID", help="message id of a single message")
    parser.add_argument(
        "--dedup-id", metavar="ID", help="for a single message: publish it once, even if it is sent several times"
    )
    parser.add_argument(
        "--delay-seconds",
        type=seconds(0, DELAY_SECONDS_MAX),
        metavar="SECONDS",
        help="time until messages become visible (at most 30 days)",
    )
    parser.add_argument(
        "--ttl-seconds",
        type=seconds(0, TTL_SECONDS_MAX),
        metavar="SECONDS",
        help="discard messages that are not leased within this time after they became visible (at most 365 days)",
    )
    add_former(parser, "--delay", "--delay-seconds")
    add_former(parser, "--ttl", "--ttl-seconds")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show count and rate on standard error (default: on a terminal)",
    )


@dataclass(slots=True)
class Report:
    """Adds up the results of the batches. ``error`` is the error that ends the command, or None."""

    printer: Printer
    progress: Progress
    published: int = 0
    latest_id: str | None = None
    duplicates: int = 0
    refused: int = 0
    error: PopgateError | None = field(default=None)

    def add(self, batch_result: BatchResult) -> None:
        self.published += batch_result.published
        self.latest_id = batch_result.latest_id or self.latest_id
        self.duplicates += batch_result.duplicates
        self.error = self.error or batch_result.error
        self.refuse(batch_result.refused)

    def refuse(self, refusals: Sequence[Refusal]) -> None:
        self.refused += len(refusals)
        if refusals:
            self.progress.clear()
            self.printer.print(map(_refusal_object, refusals))

    def summary(self, topic: str, unanswered: int) -> str:
        parts = [f"published {self.published:,} to {topic} in {self.progress.elapsed_seconds:.1f} s"]
        if self.duplicates:
            parts.append(f"including {self.duplicates:,} duplicates")
        if self.refused:
            parts.append(f"{self.refused:,} failed")
        if self.published == 1 and self.latest_id is not None:
            parts.append(f"message id {self.latest_id}")
        if unanswered:
            parts.append(f"{unanswered:,} may or may not be published")
        return ", ".join(parts)


def publish(arguments: argparse.Namespace) -> int:
    """Publish all messages. The exit code 0 means that every message is on stable storage."""
    topic: str = arguments.topic
    _check(arguments)
    report = Report(
        Printer(REFUSAL_COLUMNS, output_of(arguments)),
        Progress(sys.stderr, shown=False if is_quiet(arguments) else arguments.progress),
    )
    with open_client(arguments) as client:
        pipeline = Pipeline(partial(send, client.publish, topic))
        try:
            _pump(numbered_batches(arguments, report.refuse), pipeline, report)
        except KeyboardInterrupt:
            for batch_result in pipeline.drain(INTERRUPT_PATIENCE_SECONDS):
                report.add(batch_result)
            raise
        finally:
            report.progress.clear()
            note(arguments, report.summary(topic, pipeline.unanswered))
    if report.error is not None:
        raise report.error
    return ExitCode.FAILED if report.refused else ExitCode.OK


def _check(arguments: argparse.Namespace) -> None:
    if arguments.bodies and (arguments.whole or arguments.json_lines):
        raise CommandFailed("give bodies as arguments or on standard input, not both", ExitCode.USAGE)
    for flag, value in (("--message-id", arguments.message_id), ("--dedup-id", arguments.dedup_id)):
        if value is not None and not arguments.whole and len(arguments.bodies) != 1:
            raise CommandFailed(f"{flag} is for a single message: one BODY, or --whole", ExitCode.USAGE)
    if not arguments.bodies and sys.stdin is None:
        raise CommandFailed("standard input is closed; give bodies as arguments", ExitCode.USAGE)


def _pump(numbered_batches: Iterator[list[Numbered]], pipeline: Pipeline, report: Report) -> None:
    """Send all batches, and add their results to ``report``. Stop reading the input at the first error that would also
    affect all further batches."""
    for batch in numbered_batches:
        # Messages with the same ordering key stay in order only if each batch is sent after the answer to the previous
        # batch. Until a message has been published, only one batch is sent at the same time, because an error may
        # affect all batches.
        alone = report.published == 0 or any(one.message.ordering_key is not None for one in batch)
        for batch_result in pipeline.make_room(alone=alone):
            report.add(batch_result)
        if report.error is not None:
            break
        if batch:
            pipeline.submit(batch)
        report.progress.tell(report.published, report.refused)
    for batch_result in pipeline.drain():
        report.add(batch_result)
        report.progress.tell(report.published, report.refused)


def _refusal_object(refusal: Refusal) -> JsonObject:
    named = {"message_id": refusal.message_id} if refusal.message_id else {}
    error = {"code": refusal.code, "detail": refusal.detail}
    return {"number": refusal.number, "status": "failed", **named, "error": error}
