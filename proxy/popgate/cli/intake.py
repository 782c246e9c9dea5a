"""Reads the messages for ``popgate publish`` from arguments, or from standard input: as lines of text, as JSON lines,
or as one message."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from popgate.cli.messages import MESSAGE_BYTES_MAX, BadMessage, Defaults, outgoing, outgoing_from_json
from popgate.cli.printing import complain
from popgate.cli.reading import BATCH_COUNT_MAX, Line, LineSource, batches, read_whole
from popgate.cli.sending import Numbered, Refusal

JSON_LINE_BYTES_MAX = 2 * MESSAGE_BYTES_MAX

Refuse: TypeAlias = Callable[[Sequence[Refusal]], None]


def numbered_batches(arguments: argparse.Namespace, refuse: Refuse) -> Iterator[list[Numbered]]:
    """Yield batches of messages with their positions in the input. While no message arrives, yield an empty batch from
    time to time.

    If a part of the input is no valid message, ``refuse`` is called as soon as that part is read.
    """
    defaults = Defaults(
        headers=dict(arguments.headers),
        ordering_key=arguments.ordering_key,
        message_id=arguments.message_id,
        dedup_id=arguments.dedup_id,
        delay_seconds=arguments.delay_seconds,
        ttl_seconds=arguments.ttl_seconds,
    )
    if arguments.bodies:
        numbered = [
            Numbered(number, outgoing(body.encode("utf-8", "surrogateescape"), defaults))
            for number, body in enumerate(arguments.bodies, 1)
        ]
        for start in range(0, len(numbered), BATCH_COUNT_MAX):
            yield numbered[start : start + BATCH_COUNT_MAX]
        return
    descriptor = sys.stdin.fileno()
    if sys.stdin.isatty():
        complain("reading from the terminal; end with Ctrl-D")
    if arguments.whole:
        body = read_whole(descriptor, MESSAGE_BYTES_MAX)
        if body is None:
            refuse([_too_long(1)])
        else:
            yield [Numbered(1, outgoing(body, defaults))]
        return
    limit = JSON_LINE_BYTES_MAX if arguments.json_lines else MESSAGE_BYTES_MAX
    for lines in batches(LineSource(descriptor, line_bytes_max=limit)):
        yield _parsed(lines, defaults, refuse, as_json=arguments.json_lines)


def _parsed(lines: Sequence[Line], defaults: Defaults, refuse: Refuse, *, as_json: bool) -> list[Numbered]:
    numbered: list[Numbered] = []
    for line in lines:
        if line.too_long:
            refuse([_too_long(line.number)])
        elif not as_json:
            numbered.append(Numbered(line.number, outgoing(line.content, defaults)))
        elif line.content.strip():
            try:
                numbered.append(Numbered(line.number, outgoing_from_json(line.content, defaults)))
            except BadMessage as error:
                refuse([Refusal(line.number, None, "invalid_line", str(error))])
    return numbered


def _too_long(number: int) -> Refusal:
    return Refusal(number, None, "message_too_large", "a message is at most 16 MiB")
