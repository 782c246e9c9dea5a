"""`python -m support.poisoned_proxy` is `popgate` that fails on messages with the header `poison`, in one place.

The environment names the place. Each place stands for a bug that such a message triggers there every time.
"""

# pyright: reportPrivateUsage=false
# A planted bug may reach into private code.

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from popgate.adapters.journal_parquet.rows import Rows, SharedRows
from popgate.api import lease_groups, native, pulls
from popgate.api.arrow import ArrowEncoder
from popgate.cli import main
from popgate.domain.message import Message
from popgate.domain.names import Subscription
from popgate.engine.dead_letters import dead_walk
from popgate.engine.lease import moves
from popgate.engine.lease_groups.slices import GroupMessage
from popgate.engine.queue.queue_order import QueueOrder
from popgate.ports.journal import EventKind, JournalSubject
from support.proxy import python_program

PLACE = "POISONED_PLACE"


def poisoned_program(place: str) -> tuple[str, ...]:
    """Return a program that takes the command line of `popgate` and fails in `place`."""
    path = os.pathsep.join(filter(None, sys.path))
    return ("env", f"PYTHONPATH={path}", f"{PLACE}={place}", *python_program("-m", "support.poisoned_proxy"))


def _is_poison(value: object) -> bool:
    """Tell whether an argument is such a message, its headers, or an object that contains it."""
    if isinstance(value, dict):
        return "poison" in value
    message: object = value if isinstance(value, Message) else getattr(value, "message", None)
    return isinstance(message, Message) and message.body == b"poison"


def _poison(owner: Any, *names: str) -> None:
    """Make functions of `owner` fail whenever they receive such a message."""

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if any(_is_poison(one) for one in (*arguments, *named.values())):
                raise RecursionError("poison")
            return function(*arguments, **named)

        return call

    for name in names:
        setattr(owner, name, failing(getattr(owner, name)))


class _UnlessBare:
    """Encoders that fail on poison, except when it is passed bare."""

    def __init__(self, show: Callable[[Any], Any]) -> None:
        self._show = show

    def __call__(self, one: Any) -> Any:
        if "poison" in one.message.headers:
            raise RecursionError("poison")
        return self._show(one)


def _poison_answers() -> None:
    columns = ArrowEncoder._columns

    def failing(encoder: ArrowEncoder, messages: Sequence[GroupMessage]) -> list[Any]:
        if any("poison" in one.message.headers for one in messages):
            raise RecursionError("poison")
        return columns(encoder, messages)

    ArrowEncoder._columns = failing  # type: ignore[method-assign,assignment]
    for module, names in ((native, ("popped_in_json", "popped_packed")), (pulls, ("_packed", "_in_json"))):
        for name in names:
            setattr(module, name, _UnlessBare(getattr(module, name)))
    for name in ("_packed", "_shown"):
        setattr(lease_groups, name, _UnlessBare(getattr(lease_groups, name)))


def _poison_journal() -> None:
    rows_of = SharedRows.of

    def failing(
        rows: SharedRows, kind: EventKind, subscription: Subscription, subjects: Sequence[JournalSubject]
    ) -> Rows:
        if any(map(_is_poison, subjects)):
            raise RecursionError("poison")
        return rows_of(rows, kind, subscription, subjects)

    SharedRows.of = failing  # type: ignore[method-assign,assignment]


POISONS: dict[str, Callable[[], None]] = {
    "where it is delivered": lambda: _poison(QueueOrder, "place"),
    "where its dead letter is made": lambda: _poison(moves, "dead_letter_headers"),
    "wherever its dead letter is made": lambda: _poison(moves.Mover, "_dead_letter"),
    "where its dead letter is read": lambda: _poison(dead_walk, "unpacked"),
    "where it is shown": _poison_answers,
    "where it is journaled": _poison_journal,
}


if __name__ == "__main__":
    POISONS[os.environ[PLACE]]()
    sys.exit(main())
