"""What a queue host tells its subscription."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from popgate.engine.held import Held

if TYPE_CHECKING:
    from popgate.engine.queue_host import QueueHost


class Sink(Protocol):
    """What a host tells its subscription. All synchronous."""

    def next_sequence(self) -> int: ...
    def became_ready(self, held: Sequence[Held]) -> None: ...
    def lease_ended(self, held: Held) -> None: ...
    def leased(self, held: Held) -> None:
        """The store says that it is leased."""
        ...

    def fewer_out(self) -> None:
        """A lease was settled, or waits for its retry."""
        ...

    def must_move(self, held: Sequence[Held]) -> None: ...
    def set_aside(self, held: Held, error: Exception) -> None:
        """Popgate fails on it, and its message is bare."""
        ...

    def attached(self, held: Sequence[Held]) -> None: ...
    def changed(self) -> None:
        """Something came, or may come now: parked pops look again."""
        ...

    def is_one_line(self) -> bool:
        """Whether all messages of a queue stand in one line, whatever their ordering keys."""
        ...

    def host_lost(self, host: QueueHost, /) -> None: ...
    def has_demand(self) -> bool: ...
