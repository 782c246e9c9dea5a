"""Describes how a group stands: what each proxy of the cluster knows of the group's queues and of the waiting pops.

These values are sent between proxies and to clients as they are, so each field has a plain JSON type. Times are Unix
seconds of the store's clock. ``domain.reasons`` concludes from them why a pop gets no message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingMessage:
    """The first message of an ordering key, behind which the other messages of this key wait.

    ``state``: leased, delayed, moving (to the dead letters) or ready. ``until``: when the lease or the delay ends.
    ``client``: the client that has the lease, if this is known. ``ordering_key`` is null if the caller may not read
    messages.
    """

    id: str
    message_id: str | None
    state: str
    ordering_key: str | None = None
    client: str | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStanding:
    """What the owner of one queue knows of the queue.

    ``ready`` counts messages that a pop may get now; ``blocked`` counts messages behind an earlier one of their
    ordering key. ``not_shown`` counts messages that wait at the broker and that the owner has not read; it is null if
    the queue does not exist on the broker, or if the broker does not answer. ``delayed_at_broker`` counts delayed
    messages there. ``is_paused``: the owner reads no more messages, because its memory for bodies is
    full. ``is_sorting``: the owner waits until the broker has redelivered all messages. ``is_claimed``: the
    store has confirmed this owner. ``trouble``: why the owner can't consume the queue. ``next_at``: when the next lease
    or delay ends.
    """

    queue: int
    broker_queue: str
    ready: int = 0
    blocked: int = 0
    leased: int = 0
    delayed: int = 0
    moving: int = 0
    set_aside: int = 0
    not_shown: int | None = 0
    delayed_at_broker: int = 0
    exists: bool = True
    is_open: bool = False
    is_paused: bool = False
    is_sorting: bool = False
    is_claimed: bool = True
    trouble: str | None = None
    next_at: float | None = None
    blocking: Sequence[BlockingMessage] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyStanding:
    """What one proxy knows of a group.

    ``parked_pops`` counts the pops that wait at the proxy; ``filtered_pops`` are those among them that have a filter.
    ``filters`` are some of these filters, empty if the caller may not read messages. ``filters_pass``: whether one of
    the first ready messages passes one of the filters; null if there is no filter or no ready message.
    ``broker_trouble`` and ``store_trouble``: why the broker or the store can't be used now.
    """

    proxy: str
    parked_pops: int = 0
    filtered_pops: int = 0
    filters: Sequence[Mapping[str, Sequence[Any]]] = ()
    filters_pass: bool | None = None
    is_stopping: bool = False
    broker_trouble: str | None = None
    store_trouble: str | None = None
    queues: Sequence[QueueStanding] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableProxy:
    """A proxy that did not answer, and the queues that it owns: their messages are missing from the answer."""

    proxy: str
    detail: str
    queues: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnownedQueue:
    """A queue that no proxy owns at the moment. ``ready``: its messages at the broker, or null if this is unknown."""

    queue: int
    broker_queue: str
    ready: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStanding:
    """A group, as all proxies together know it."""

    topic: str
    group: str
    mode: str
    paused: bool = False
    max_in_flight: int | None = None
    dead: int | None = None
    proxies: Sequence[ProxyStanding] = ()
    unowned: Sequence[UnownedQueue] = ()
    unreachable: Sequence[UnreachableProxy] = field(default=())

    @property
    def queues(self) -> list[QueueStanding]:
        """The queues of all proxies that have answered, by their number."""
        return sorted((queue for proxy in self.proxies for queue in proxy.queues), key=lambda queue: queue.queue)
