"""Defines a client's orders to ack, release, extend or reject its leases, and the results of these orders."""

from enum import StrEnum
from typing import NamedTuple

from popgate.domain.attempts import Cause
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
    """A client's order for one lease.

    ``seconds``: the new visibility timeout of an extension, or the delay of a release. A release with None uses the
    retry delay of the group's policy. ``cause``: why the client gives the message back, if it says so.
    """

    receipt_handle: str
    seconds: float | None = None
    reason: str = ""
    cause: Cause | None = None


class SettleResult(NamedTuple):
    """The result of an order for one lease. Clients see the value of ``status`` in the HTTP API.

    ``invisible_until`` (Unix seconds) is set only if ``status`` is "extended".
    """

    status: str
    invisible_until: float | None = None


class ValidOrder(NamedTuple):
    """An order whose receipt handle is valid. ``place``: the index of the order in its request."""

    place: int
    order: SettleOrder
    receipt: Receipt
    host: QueueHost

    @property
    def buffered(self) -> BufferedMessage | None:
        """The message in this proxy's memory; None if this proxy has no state of the message."""
        return self.host.find(self.receipt.copy_id)

    @property
    def has_its_lease(self) -> bool:
        """Whether this proxy has the message in its memory, leased with the lease of the receipt."""
        buffered = self.buffered
        return (
            buffered is not None
            and buffered.state is MessageState.LEASED
            and buffered.lease_id == self.receipt.lease_id
        )

    @property
    def is_transient(self) -> bool:
        return is_transient(self.receipt.copy_id)


def cause_of(one: ValidOrder) -> Cause:
    """Return why a client gives a message back, with the name of the client, if this proxy knows it."""
    cause = one.order.cause or Cause()
    buffered = one.buffered
    if cause.client or buffered is None or not buffered.client or buffered.lease_id != one.receipt.lease_id:
        return cause
    return cause._replace(client=buffered.client)


INVALID = SettleResult("invalid")
EXPIRED = SettleResult("expired")
UNAVAILABLE = SettleResult("unavailable")
