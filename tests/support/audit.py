"""An independent record of what popgate was asked and what it promised, to be judged by `audit_rules`.

Owns what was said, by whom and when; knows nothing of HTTP, processes or popgate's insides. Clients write down every
request before it is sent and every answer when it has arrived, so that a request whose answer was lost is known to have
been sent. All times are readings of the event loop's clock, in seconds, which is this machine's monotonic one where no
simulation has another: no wall clock, and none of the proxy's.

Only what an answer promised is held against popgate. Whatever lies between a request and its answer is given the
meaning that suits popgate best.
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
    """One clock for every process of the machine, or of the simulation."""
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
"""Answers after which nobody ever gets the message again."""
LOST = frozenset({"expired", "invalid"})
"""Answers that say that the lease has ended: the settlement has changed nothing."""


class Mark(NamedTuple):
    """Something that was done to the servers, such as a kill."""

    at: float
    what: str


class Traits(NamedTuple):
    """What is asked for with one message. Whoever publishes with a key waits for an answer before the next of it."""

    ordering_key: str | None = None
    delay_seconds: float = 0.0
    dedup_id: str | None = None
    color: str | None = None
    ttl_seconds: float = float("inf")


PLAIN = Traits()


@dataclass(slots=True)
class Publish:
    """One message on its way in. `status` "" : no answer, nobody knows whether it is stored. `number`: the how many-th
    of all it is. A repeat with its dedup_id is the same publish, first `sent` when it was first sent."""

    message_id: str
    body_bytes: int
    sent: float
    number: int
    traits: Traits = PLAIN
    answered: float = float("inf")
    status: str = ""
    requests: int = 1
    """How often it was sent: with a dedup_id that may be often."""
    published_answers: int = 0
    """How many of the requests were answered `published`."""

    @property
    def is_promised(self) -> bool:
        return self.status in ("published", "duplicate")

    @property
    def is_kept_until(self) -> float:
        """It certainly does not expire before."""
        return self.sent + self.traits.delay_seconds + self.traits.ttl_seconds

    @property
    def is_gone_after(self) -> float:
        """It has certainly expired by then, as soon as it has an answer."""
        return self.answered + self.traits.delay_seconds + self.traits.ttl_seconds


@dataclass(slots=True, eq=False)
class Settlement:
    """One request about one lease. `status` "": no answer, or one that leaves open what happened.

    `seconds` is the new length of an extended lease, or the delay of a release, counted from between `sent` and
    `answered`.
    """

    verb: Verb
    sent: float
    seconds: float = 0.0
    answered: float = float("inf")
    status: str = ""

    def finish(self, status: str) -> None:
        """The answer has arrived now."""
        self.answered, self.status = now(), status


@dataclass(slots=True, eq=False)
class Lease:
    """One message in one pop's answer. It began between `sent` and `answered`, and was to last for `seconds`."""

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
        """It certainly lasts that long, if nobody settles it."""
        return self.sent + self.seconds

    def begin(self, verb: Verb, seconds: float = 0.0) -> Settlement:
        """A settlement is about to be sent; `finish` it when its answer arrives."""
        settlement = Settlement(verb, now(), seconds)
        self.settlements.append(settlement)
        return settlement

    @property
    def is_settled(self) -> bool:
        return any(settlement.status in SETTLED for settlement in self.settlements)

    @property
    def may_be_settled(self) -> bool:
        """Whether an ack or a rejection of it may have taken effect, its answer being unknown."""
        return any(
            settlement.verb in (Verb.ACK, Verb.REJECT) and settlement.status not in LOST
            for settlement in self.settlements
        )


@dataclass(slots=True, eq=False)
class Pop:
    """One pop request. `answered` infinite: no answer arrived, and it may have leased messages.

    `leases_since`: when its attempt was sent for the first time, which may have given the leases already. `leases`: in
    its answer.
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
    """Everything about one message."""

    message_id: str
    publish: Publish | None = None
    leases: list[Lease] = field(default_factory=list[Lease])


class Delivered(NamedTuple):
    """One message as a pop's answer shows it. `body_bytes` is -1 where the body is not the published one."""

    message_id: str
    receipt_handle: str
    delivery_count: int
    body_bytes: int


class DeadLetter(NamedTuple):
    """One dead letter as the list of a group shows it."""

    message_id: str
    letter_id: str
    cause: str
    delivery_count: int


class Seen(NamedTuple):
    """What `GET S` and the list of dead letters answered between `sent` and `answered`, while no client was at work."""

    sent: float
    answered: float
    ready: int
    in_flight: int
    delayed: int
    dead: int
    letters: Sequence[DeadLetter]


class Audit:
    """The record of one run. Written by one event loop; times are taken when its methods are called."""

    def __init__(self) -> None:
        self.began = now()
        self.histories: dict[str, History] = {}
        self.pops: set[Pop] = set()
        self.marks: list[Mark] = []
        self.complaints: list[tuple[str, str]] = []
        """(message id or "", what nobody may see, whatever was asked)."""
        self.max_deliveries: int | None = None
        """The group's policy, should it have one."""
        self.dead_letters: Sequence[DeadLetter] | None = None
        """All that the group had when it was drained; None where nobody has looked."""
        self.redriven: Mapping[str, History] = {}
        """What came to the topic that dead letters were moved to, by message id."""
        self.away: list[tuple[float, float]] = []
        """From when to when proxies and their store may have been cut off from each other."""
        self.dropping: list[tuple[float, float]] = []
        """The time in which the broker dropped messages by itself, against popgate's promises."""
        self.seen: list[Seen] = []
        self.are_hand_outs_hidden = False
        """Whether a proxy may have leased a message to another one, after a fault, without any client's knowing."""
        self.healed_at = self.drained_at = float("inf")
        self.drain_seconds_max = float("inf")
        """How long after `healed_at` the group is drained at the latest."""
        self.published_count = 0
        self.lease_count = 0
        self._publish_count = 0
        self._open: set[str] = set()
        self._expiring: list[tuple[float, str]] = []
        """A heap: when which open message may expire."""
        self._receipts: dict[str, tuple[Lease, str | None]] = {}
        self._attempts: dict[str, float] = {}

    # ------------------------------------------------------------ publishing

    def publishing(self, messages: Sequence[tuple[str, int]], traits: Sequence[Traits] | None = None) -> list[Publish]:
        """Messages (id, bytes of the body) are about to be sent."""
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
        """Their last answers have arrived now."""
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
        """An answer has arrived that may not be the last one, because they are sent again."""
        for publish, status in zip(publishes, statuses, strict=True):
            publish.published_answers += status == "published"

    def not_published(self, publishes: Sequence[Publish]) -> None:
        """They were not even sent: nobody may get them."""
        for publish in publishes:
            del self.histories[publish.message_id]

    # ------------------------------------------------------------ popping

    def popping(self, client: str, seconds: float, *, attempt_id: str | None = None) -> Pop:
        """A pop for leases of `seconds` is about to be sent; one attempt always asks for the same."""
        sent = since = now()
        if attempt_id is not None:
            since = self._attempts.setdefault(attempt_id, sent)
        pop = Pop(client, sent, seconds, attempt_id, since)
        self.pops.add(pop)
        return pop

    def popped(self, pop: Pop, messages: Iterable[Delivered]) -> list[Lease]:
        """The pop's answer has arrived now; the leases it gave."""
        pop.answered = now()
        leases: list[Lease] = []
        for message_id, receipt_handle, delivery_count, body_bytes in messages:
            history = self._history(message_id)
            if history.publish is None:
                self.complain("was handed out, but nobody published it", message_id)
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
        """It was not even sent."""
        self.pops.remove(pop)

    # ------------------------------------------------------------ settling

    def settled(self, lease: Lease, settlement: Settlement, status: str) -> None:
        """A settlement's answer has arrived now."""
        settlement.finish(status)
        if status in SETTLED:
            self._open.discard(lease.message_id)

    def not_settled(self, leases: Iterable[Lease], settlements: Iterable[Settlement]) -> None:
        """They were not even sent: nothing has changed."""
        for lease, settlement in zip(leases, settlements, strict=True):
            lease.settlements.remove(settlement)

    # ------------------------------------------------------------ anything else

    def mark(self, what: str) -> float:
        """Something is being done to the servers now."""
        mark = Mark(now(), what)
        self.marks.append(mark)
        return mark.at

    @contextmanager
    def is_away(self) -> Generator[None]:
        """Inside of the block proxies and their store may be cut off from each other."""
        began = now()
        try:
            yield
        finally:
            self.away.append((began, now()))

    def complain(self, what: str, message_id: str = "") -> None:
        """Note something that no promise is needed to forbid."""
        self.complaints.append((message_id, what))

    def may_drop(self, since: float, until: float) -> None:
        """Between these times the broker was told to drop messages that came to it, then or later."""
        self.dropping.append((since, until))
        for message_id in [*self._open]:
            publish = self.histories[message_id].publish
            if publish is not None and self.may_be_dropped(publish):
                self._open.discard(message_id)

    def may_be_dropped(self, publish: Publish) -> bool:
        """Whether it may have come to its queue while the broker dropped messages.

        What was delayed may have been stuck on its way, what has no answer may have come later.
        """
        arrives = publish.sent + publish.traits.delay_seconds
        comes_late = publish.traits.delay_seconds or not publish.status
        arrived = float("inf") if comes_late else publish.answered
        return any(since <= arrived and arrives <= until for since, until in self.dropping)

    def heal(self, drain_seconds_max: float) -> None:
        """All parts are back now: everything has to be drained within that time."""
        self.healed_at = self.mark("all is back")
        self.drain_seconds_max = drain_seconds_max

    def drained(self) -> None:
        """popgate says now that nothing is left."""
        self.drained_at = now()

    @property
    def open_count(self) -> int:
        """How many promised messages are not settled for sure, and can't have expired."""
        while self._expiring and self._expiring[0][0] <= now():
            self._open.discard(heapq.heappop(self._expiring)[1])
        return len(self._open)

    def outstanding(self) -> list[str]:
        """Promised messages that must come again: neither settled nor perhaps settled nor perhaps expired."""
        if not self.open_count:
            return []
        return [
            message_id
            for message_id in self._open
            if not any(lease.may_be_settled for lease in self.histories[message_id].leases)
        ]

    def figures(self) -> dict[str, int]:
        """What a report says about the run."""
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
