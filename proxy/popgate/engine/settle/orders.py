"""Defines a client's orders for its leases, and their results."""

from enum import StrEnum
from typing import NamedTuple

from popgate.domain.names import is_transient
from popgate.domain.receipt import Receipt
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.host import QueueHost


class Verb(StrEnum):
    ACK = "ack"
    RELEASE = "release"
    EXTEND = "extend"
    REJECT = "reject"


class SettleOrder(NamedTuple):
    """A client's request for one lease.

    ``seconds``: the extension, or the delay of a release (None: the delay of the group's policy).
    """

    receipt_handle: str
    seconds: float | None = None
    reason: str = ""


class SettleResult(NamedTuple):
    """The result for one lease. ``status`` is part of the HTTP interface.

    ``invisible_until`` (Unix seconds) is set only for ``extended``.
    """

    status: str
    invisible_until: float | None = None


class ValidOrder(NamedTuple):
    """An order whose receipt is valid."""

    place: int
    order: SettleOrder
    receipt: Receipt
    host: QueueHost

    @property
    def buffered(self) -> BufferedMessage | None:
        """This proxy's present state of the message; None if the message is not on this proxy."""
        return self.host.find(self.receipt.copy_id)

    @property
    def has_its_lease(self) -> bool:
        """Whether the message is on this proxy and, in this proxy's state, still has the lease of the receipt."""
        buffered = self.buffered
        return (
            buffered is not None
            and buffered.state is MessageState.LEASED
            and buffered.lease_id == self.receipt.lease_id
        )

    @property
    def is_transient(self) -> bool:
        return is_transient(self.receipt.copy_id)


INVALID = SettleResult("invalid")
EXPIRED = SettleResult("expired")
UNAVAILABLE = SettleResult("unavailable")
