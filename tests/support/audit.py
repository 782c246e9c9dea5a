"""An independent record of the requests to popgate and its answers, to be judged by `audit_rules`.

The record owns each request, its client and its times; it knows nothing of HTTP, processes or popgate's internals.
Clients record every request before they send it and every answer when it arrives, so a request whose answer was lost is
known to have been sent. All times are readings of the event loop's clock in seconds: the machine's monotonic clock, or
the virtual clock of a simulation. No wall clock and no proxy's clock is used.

popgate is held only to what an answer promised. Anything uncertain between a request and its answer is interpreted in
popgate's favour.
"""

import asyncio
import heapq
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


def now() -> float:
    """Read the one clock shared by all processes of the machine, or of the simulation."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class Verb(StrEnum):
    ACK = "ack"
    RELEASE = "release"
    EXTEND = "extend"
    REJECT = "reject"


DONE = {Verb.ACK: "acked", Verb.RELEASE: "released", Verb.EXTEND: "extended", Verb.REJECT: "rejected"}
ALREADY_ACKED = "already_acked"
ACKED = frozenset({"acked", ALREADY_ACKED})
SETTLED = ACKED | {"rejected"}
"""Answers after which no client ever gets the message again."""
LOST = frozenset({"expired", "invalid"})
"""Answers that say that the lease had ended, so the settlement changed nothing."""


class Mark(NamedTuple):
    """A disturbance of the servers, such as a kill."""

    at: float
    what: str


class Traits(NamedTuple):
    """The features requested for one message. A publisher that uses a key waits for each answer before it publishes
    to the key again.
    """

    ordering_key: str | None = None
    delay_seconds: float = 0.0
    dedup_id: str | None = None
    color: str | None = None
    ttl_seconds: float = float("inf")


PLAIN = Traits()


@dataclass(slots=True)
class Publish:
    """One published message. `status` is "" if no answer arrived, so whether it is stored is unknown. `number` is
    its position among all publishes. A repeat with the same dedup_id is the same publish; `sent` is the time of the
    first attempt.
    """

    message_id: str
    body_bytes: int
    sent: float
    number: int
    traits: Traits = PLAIN
    answered: float = float("inf")
    status: str = ""
    requests: int = 1
    """Number of times it was sent; only a message with a dedup_id may be sent more than once."""
    published_answers: int = 0
    """Number of requests that were answered `published`."""

    @property
    def is_promised(self) -> bool:
        return self.status in ("published", "duplicate")

    @property
    def is_kept_until(self) -> float:
        """Return the time before which it certainly does not expire."""
        return self.sent + self.traits.delay_seconds + self.traits.ttl_seconds

    @property
    def is_gone_after(self) -> float:
        """Return the time by which it has certainly expired, if its publish was answered."""
        return self.answered + self.traits.delay_seconds + self.traits.ttl_seconds


@dataclass(slots=True, eq=False)
class Settlement:
    """One request about one lease. `status` is "" if there was no answer or the answer leaves the outcome open.

    `seconds` is the new length of an extended lease, or the delay of a release; it counts from a time between `sent`
    and `answered`.
    """

    verb: Verb
    sent: float
    seconds: float = 0.0
    answered: float = float("inf")
    status: str = ""

    def finish(self, status: str) -> None:
        """Record that the answer has just arrived."""
        self.answered, self.status = now(), status


@dataclass(slots=True, eq=False)
class Lease:
    """One message in the answer to a pop. The lease began between `sent` and `answered`, and was to last for
    `seconds`.
    """

    message_id: str
    receipt_handle: str
    client: str
    sent: float
    answered: float
    seconds: float
    delivery_count: int
    settlements: list[Settlement] = field(default_factory=list[Settlement])

    @property
    def ends_at(self) -> float:
        """Return the time until which it certainly lasts if it is not settled."""
        return self.sent + self.seconds

    def begin(self, verb: Verb, seconds: float = 0.0) -> Settlement:
        """Record a settlement before it is sent; call `finish` on it when its answer arrives."""
        settlement = Settlement(verb, now(), seconds)
        self.settlements.append(settlement)
        return settlement

    @property
    def is_settled(self) -> bool:
        return any(settlement.status in SETTLED for settlement in self.settlements)

    @property
    def may_be_settled(self) -> bool:
        """Tell whether an ack or a rejection of it with an unknown outcome may have taken effect."""
        return any(
            settlement.verb in (Verb.ACK, Verb.REJECT) and settlement.status not in LOST
            for settlement in self.settlements
        )


@dataclass(slots=True, eq=False)
class Pop:
    """One pop request. If `answered` is infinite, no answer arrived, and it may have leased messages.

    `leases_since` is when the attempt was first sent, which may already have granted the leases. `leases` counts those
    in the answer.
    """

    client: str
    sent: float
    seconds: float
    attempt_id: str | None
    leases_since: float
    answered: float = float("inf")
    leases: list[Lease] = field(default_factory=list[Lease])


@dataclass(slots=True)
class History:
    """All events of one message."""

    message_id: str
    publish: Publish | None = None
    leases: list[Lease] = field(default_factory=list[Lease])


class Delivered(NamedTuple):
    """One message as a pop's answer shows it. `body_bytes` is -1 if the body is not the published one."""

    message_id: str
    receipt_handle: str
    delivery_count: int
    body_bytes: int


class DeadLetter(NamedTuple):
    """One dead letter as the group's list shows it."""

    message_id: str
    letter_id: str
    cause: str
    delivery_count: int


class Seen(NamedTuple):
    """The answers of `GET S` and of the list of dead letters between `sent` and `answered`, while no client was
    active.
    """

    sent: float
    answered: float
    ready: int
    in_flight: int
    delayed: int
    dead: int
    letters: Sequence[DeadLetter]


class Audit:
    """The record of one run. One event loop writes it; each method takes the time when it is called."""

    def __init__(self) -> None:
        self.began = now()
        self.histories: dict[str, History] = {}
        self.pops: set[Pop] = set()
        self.marks: list[Mark] = []
        self.complaints: list[tuple[str, str]] = []
        """Violations of no particular promise, as (message id or "", description)."""
        self.max_deliveries: int | None = None
        """The group's delivery limit, if its policy has one."""
        self.dead_letters: Sequence[DeadLetter] | None = None
        """All dead letters of the group when it was drained; None if they were not read."""
        self.redriven: Mapping[str, History] = {}
        """Messages that arrived in the topic to which dead letters were redriven, by message id."""
        self.away: list[tuple[float, float]] = []
        """Periods in which proxies and their store may have been disconnected from each other."""
        self.dropping: list[tuple[float, float]] = []
        """The period in which the broker itself dropped messages, against popgate's promises."""
        self.seen: list[Seen] = []
        self.are_hand_outs_hidden = False
        """Whether, after a fault, one proxy may have leased a message to another without any client's knowledge."""
        self.healed_at = self.drained_at = float("inf")
        self.drain_seconds_max = float("inf")
        """Maximum seconds from `healed_at` until the group is drained."""
        self.published_count = 0
        self.lease_count = 0
        self._publish_count = 0
        self._open: set[str] = set()
        self._expiring: list[tuple[float, str]] = []
        """A heap of the times at which open messages may expire."""
        self._receipts: dict[str, tuple[Lease, str | None]] = {}
        self._attempts: dict[str, float] = {}

    # ------------------------------------------------------------ publishing

    def publishing(self, messages: Sequence[tuple[str, int]], traits: Sequence[Traits] | None = None) -> list[Publish]:
        """Record messages (id, bytes of the body) before they are sent."""
        sent, number = now(), self._publish_count
        self._publish_count += len(messages)
        publishes = [
            Publish(message_id, body_bytes, sent, number + place, one)
            for place, ((message_id, body_bytes), one) in enumerate(
                zip(messages, traits or [PLAIN] * len(messages), strict=True)
            )
        ]
        for publish in publishes:
            self._history(publish.message_id).publish = publish
        return publishes

    def published(self, publishes: Sequence[Publish], statuses: Sequence[str]) -> None:
        """Record that their last answers have just arrived."""
        self.publish_answered(publishes, statuses)
        answered = now()
        for publish, status in zip(publishes, statuses, strict=True):
            publish.answered, publish.status = answered, status
            if publish.is_promised:
                self.published_count += 1
                if not self._is_settled(publish.message_id):
                    self._open.add(publish.message_id)
                    if publish.is_kept_until < float("inf"):
                        heapq.heappush(self._expiring, (publish.is_kept_until, publish.message_id))

    def publish_answered(self, publishes: Sequence[Publish], statuses: Sequence[str]) -> None:
        """Record an answer that may not be the last, because the messages are sent again."""
        for publish, status in zip(publishes, statuses, strict=True):
            publish.published_answers += status == "published"

    def not_published(self, publishes: Sequence[Publish]) -> None:
        """Record that they were never sent, so no client may get them."""
        for publish in publishes:
            del self.histories[publish.message_id]

    # ------------------------------------------------------------ popping

    def popping(self, client: str, seconds: float, *, attempt_id: str | None = None) -> Pop:
        """Record a pop for leases of `seconds` before it is sent; all requests of one attempt ask for the same."""
        sent = since = now()
        if attempt_id is not None:
            since = self._attempts.setdefault(attempt_id, sent)
        pop = Pop(client, sent, seconds, attempt_id, since)
        self.pops.add(pop)
        return pop

    def popped(self, pop: Pop, messages: Iterable[Delivered]) -> list[Lease]:
        """Record the pop's answer, which has just arrived, and return its leases."""
        pop.answered = now()
        leases: list[Lease] = []
        for message_id, receipt_handle, delivery_count, body_bytes in messages:
            history = self._history(message_id)
            if history.publish is None:
                self.complain("was handed out, but was never published", message_id)
            elif history.publish.body_bytes != body_bytes:
                self.complain("was handed out with another body", message_id)
            known = self._receipts.get(receipt_handle)
            if known is not None:
                lease, attempt_id = known
                if attempt_id is None or attempt_id != pop.attempt_id:
                    self.complain("was handed out twice under one receipt handle", message_id)
                leases.append(lease)
                continue
            began = pop.leases_since
            lease = Lease(message_id, receipt_handle, pop.client, began, pop.answered, pop.seconds, delivery_count)
            self._receipts[receipt_handle] = lease, pop.attempt_id
            history.leases.append(lease)
            self.lease_count += 1
            leases.append(lease)
        pop.leases = leases
        return leases

    def not_popped(self, pop: Pop) -> None:
        """Record that it was never sent."""
        self.pops.remove(pop)

    # ------------------------------------------------------------ settling

    def settled(self, lease: Lease, settlement: Settlement, status: str) -> None:
        """Record a settlement's answer, which has just arrived."""
        settlement.finish(status)
        if status in SETTLED:
            self._open.discard(lease.message_id)

    def not_settled(self, leases: Iterable[Lease], settlements: Iterable[Settlement]) -> None:
        """Record that they were never sent, so nothing has changed."""
        for lease, settlement in zip(leases, settlements, strict=True):
            lease.settlements.remove(settlement)

    # ------------------------------------------------------------ anything else

    def mark(self, what: str) -> float:
        """Record a disturbance of the servers that happens now."""
        mark = Mark(now(), what)
        self.marks.append(mark)
        return mark.at

    @contextmanager
    def is_away(self) -> Generator[None]:
        """Record that proxies and their store may be disconnected from each other inside the block."""
        began = now()
        try:
            yield
        finally:
            self.away.append((began, now()))

    def complain(self, what: str, message_id: str = "") -> None:
        """Record an observation that is wrong whatever popgate promised."""
        self.complaints.append((message_id, what))

    def may_drop(self, since: float, until: float) -> None:
        """Record that the broker was configured between these times to drop messages that reached it, then or later."""
        self.dropping.append((since, until))
        for message_id in [*self._open]:
            publish = self.histories[message_id].publish
            if publish is not None and self.may_be_dropped(publish):
                self._open.discard(message_id)

    def may_be_dropped(self, publish: Publish) -> bool:
        """Tell whether it may have reached its queue while the broker dropped messages.

        A delayed message may have been held up on its way; a message without an answer may have arrived later.
        """
        arrives = publish.sent + publish.traits.delay_seconds
        comes_late = publish.traits.delay_seconds or not publish.status
        arrived = float("inf") if comes_late else publish.answered
        return any(since <= arrived and arrives <= until for since, until in self.dropping)

    def heal(self, drain_seconds_max: float) -> None:
        """Record that all parts work again; the group must be drained within the time limit from here."""
        self.healed_at = self.mark("all is back")
        self.drain_seconds_max = drain_seconds_max

    def drained(self) -> None:
        """Record that popgate now reports nothing left."""
        self.drained_at = now()

    @property
    def open_count(self) -> int:
        """Return how many promised messages are not certainly settled and can't have expired."""
        while self._expiring and self._expiring[0][0] <= now():
            self._open.discard(heapq.heappop(self._expiring)[1])
        return len(self._open)

    def outstanding(self) -> list[str]:
        """Return the promised messages that must be delivered again: neither possibly settled nor possibly expired."""
        if not self.open_count:
            return []
        return [
            message_id
            for message_id in self._open
            if not any(lease.may_be_settled for lease in self.histories[message_id].leases)
        ]

    def figures(self) -> dict[str, int]:
        """Return the figures for a report on the run."""
        leases = [lease for history in self.histories.values() for lease in history.leases]
        statuses = [settlement.status for lease in leases for settlement in lease.settlements]
        publishes = [history.publish for history in self.histories.values() if history.publish is not None]
        return {
            "published": sum(publish.is_promised for publish in publishes),
            "publishes without a promise": sum(not publish.is_promised for publish in publishes),
            "leases": len(leases),
            "pops unanswered": sum(pop.answered == float("inf") for pop in self.pops),
            "acked": statuses.count("acked"),
            "released": statuses.count("released"),
            "extended": statuses.count("extended"),
            "rejected": statuses.count("rejected"),
            "told expired": statuses.count("expired"),
            "settlements unanswered": statuses.count(""),
            "with a short ttl": sum(publish.is_kept_until < now() for publish in publishes),
        }

    def _history(self, message_id: str) -> History:
        history = self.histories.get(message_id)
        if history is None:
            history = self.histories[message_id] = History(message_id)
        return history

    def _is_settled(self, message_id: str) -> bool:
        return any(lease.is_settled for lease in self.histories[message_id].leases)
