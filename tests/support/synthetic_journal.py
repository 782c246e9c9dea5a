"""Generated journals: what a cluster of proxies would have recorded, with planted faults on request.

Vectorised: ten million events take half a minute. The same `Plan` gives the same journal. It contains everything that
popgate admits: leases that ran out, releases, rejections and the further life of the dead letters, extensions, delays,
messages still in progress when the journal ends, proxies whose clocks differ by milliseconds, settlements recorded by a
different proxy than the hand-out; and, on request, what failures leave. `Planted` lists what popgate does not admit.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

START = datetime(2026, 11, 1, tzinfo=UTC)
SECOND = 1_000_000
"""Microseconds in a second; all times are in microseconds."""
HOUR = 3_600 * SECOND
TOPIC = "orders"
GROUPS = ("billing", "shipping")
PROXIES = ("proxy-1", "proxy-2", "proxy-3")
SKEWS = np.array([0, 3_000, -2_000])
"""Clock error of each proxy."""
KINDS = (
    *("published", "delivered", "acked", "released", "extended", "expired", "rejected", "dead_lettered", "redriven"),
    *("discarded", "duplicate", "purged", "found_settled"),
)
TROUBLES = ("unanswered", "repeated", "long", "slept", "republished")
INVISIBILITY_SECONDS = 30.0

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`messages` over `hours`. Each other field is the number of planted faults of one kind."""

    messages: int = 2_000
    hours: float = 1.0
    seed: int = 1
    queues: int = 8
    keys: int = 200
    clients: int = 6
    """A group."""
    lost: int = 0
    doubled: int = 0
    acked_twice: int = 0
    came_again: int = 0
    reordered: int = 0
    stuck: int = 0
    hung_client: bool = False
    hot_queue: bool = False
    gap_rows: int = 0
    """Number of rows of one proxy that are missing."""
    troubles: int = 0
    """Number of each kind of trouble that failures and patience leave, none of which is a fault: acks that only a
    repeat or the store reports, and that are repeated hours later; leases of hours; leases whose end is reported
    late by a proxy that slept; ends of any kind that are reported twice; publishes that are repeated after their
    first attempt was discarded. Also one queue that is not consumed for three quarters of the time.
    """


Subject = tuple[str, str]
"""Group and copy id."""


@dataclass(frozen=True, slots=True)
class Planted:
    """The faults that the jobs must find. `events` is the number of events."""

    events: int
    lost: frozenset[Subject]
    doubled: frozenset[Subject]
    acked_twice: frozenset[Subject]
    came_again: frozenset[Subject]
    reordered: frozenset[Subject]
    stuck: frozenset[Subject]
    hung_client: str | None
    hot_queue: int | None
    gap_proxy: str | None


class Rows(NamedTuple):
    """Events of one kind. `group` is -1 if none is concerned, `client` if there is none, `new` if there is no new
    copy.
    """

    kind: int
    message: Ints
    group: Ints
    at: Ints
    number: Ints
    """The delivery count."""
    client: Ints
    proxy: Ints
    held: Floats
    lease: Floats
    new: Ints

    def only(self, kind: int, which: Ints) -> "Rows":
        """Return a selection of them, as another kind."""
        return Rows(kind, *(column[which] for column in self._columns()))

    def _columns(self) -> tuple[Any, ...]:
        return self[1:]


@dataclass(slots=True)
class Story:
    """One row a message and group: its latest hand-out, and the time of the next event."""

    message: Ints
    group: Ints
    delivered: Ints
    held: Floats
    client: Ints
    owner: Ints
    rows: list[Rows] = field(default_factory=list[Rows])

    def note(
        self,
        kind: str,
        which: Ints,
        at: Ints,
        count: Ints | int = 1,
        held: Floats | None = None,
        lease: float | None = None,
        client: Ints | None = None,
        proxy: Ints | None = None,
        new: Ints | None = None,
    ) -> None:
        """Record an event of the stories `which` at `at`."""
        size = len(which)
        self.rows.append(
            Rows(
                KINDS.index(kind),
                self.message[which],
                self.group[which],
                at,
                np.broadcast_to(np.asarray(count, np.int64), size),
                self.client[which] if client is None else client,
                self.owner[which] if proxy is None else proxy,
                np.full(size, np.nan) if held is None else held,
                np.full(size, np.nan if lease is None else lease),
                np.full(size, -1) if new is None else new,
            )
        )


class Messages:
    """The published messages, one a row."""

    def __init__(self, plan: Plan, chance: np.random.Generator, topic: str) -> None:
        self.topic = topic
        count, self.end = plan.messages, int(plan.hours * HOUR)
        self.start = int(START.timestamp() * SECOND)
        self.published = np.sort(chance.integers(0, self.end, count))
        self.key = np.where(chance.random(count) < 0.7, chance.integers(0, plan.keys, count), -1)
        self.queue = np.where(self.key >= 0, self.key % plan.queues, chance.integers(0, plan.queues, count))
        self.hot_queue: int | None = None
        if plan.hot_queue:  # a tenth of the time, half of all messages go to one queue
            self.hot_queue = int(chance.integers(plan.queues))
            low, high = int(0.6 * self.end), int(0.7 * self.end)
            moved = (self.published >= low) & (self.published < high) & (chance.random(count) < 0.6)
            self.queue[moved], self.key[moved] = self.hot_queue, -1
        is_delayed = (self.key < 0) & (chance.random(count) < 0.02)
        self.visible = self.published + np.where(is_delayed, chance.integers(5, 120, count) * SECOND, 0)
        self.confirmed = self.published + chance.integers(500, 8_000, count)
        self.proxy = chance.integers(0, len(PROXIES), count)
        self.size = chance.integers(100, 4_000, count).astype(np.int32)
        # New copies of dead letters come after all others.
        self.copies = chance.bytes(12 * 4 * count).hex().upper().encode()

    def copy_ids(self) -> npt.NDArray[np.bytes_]:
        return np.frombuffer(self.copies, "S24")


def told(plan: Plan, topic: str) -> tuple[np.random.Generator, Messages, Story, dict[str, Ints]]:
    """Generate the events of the messages of `plan`, and which story has which fault; continues the random sequence."""
    chance = np.random.default_rng(plan.seed)
    messages = Messages(plan, chance, topic)
    story = _stories(plan, chance, messages)
    return chance, messages, story, _deliver(plan, chance, messages, story)


def _stories(plan: Plan, chance: np.random.Generator, messages: Messages) -> Story:
    """Generate first hand-outs, in order in each queue, with the client and duration of each."""
    count = plan.messages
    message = np.tile(np.arange(count), len(GROUPS))
    group = np.repeat(np.arange(len(GROUPS)), count)
    wait = chance.exponential(0.05, len(message)) * SECOND
    ready = messages.visible[message] + 1_000 + wait.astype(np.int64)
    place = group * plan.queues + messages.queue[message]
    if plan.troubles:
        ready = np.where(place == 1, np.maximum(ready, messages.end * 3 // 4), ready)
    order = np.lexsort((messages.visible[message], place))
    far = place[order] * (1 << 44)
    delivered = np.empty_like(ready)
    # Two of a queue are at least 10 microseconds apart.
    rank = np.arange(len(order)) * 10
    delivered[order] = np.maximum.accumulate(ready[order] + far - rank) + rank - far
    median = 0.2 + 0.1 * (messages.queue[message] % 5)
    held = np.minimum(chance.lognormal(np.log(median), 0.9), 25.0)
    client = group * plan.clients + chance.integers(0, plan.clients, len(message))
    owner = messages.queue[message] % len(PROXIES)
    return Story(message, group, delivered, held, client, owner)


def _deliver(plan: Plan, chance: np.random.Generator, messages: Messages, story: Story) -> dict[str, Ints]:
    """Record the events of all stories, faults included; return which stories were chosen for which fault."""
    count = len(story.message)
    hung = np.zeros(count, np.bool_)
    if plan.hung_client:
        hung = (story.client == plan.clients - 1) & (story.delivered > messages.end // 3)
    fate = chance.random(count)
    delayed = messages.visible[story.message] > messages.published[story.message]
    plain = ~hung & ~delayed & (fate > 0.1)
    chosen = _choose(plan, chance, messages, story, plain)
    special = np.zeros(count, np.bool_)
    for which in chosen.values():
        special[which] = True
    free = ~special & ~hung
    discarded = np.flatnonzero(free & (fate < 0.002))
    story.note("discarded", discarded, story.delivered[discarded] + 40 * SECOND, 0)
    again = discarded[: plan.troubles]
    story.note("discarded", again, story.delivered[again] + 50 * SECOND, 0, proxy=_other(story, again))
    gone = np.zeros(count, np.bool_)
    gone[discarded] = True
    if "lost" in chosen:
        gone[chosen["lost"]] = True
    if plan.troubles:
        gone[chosen["long"]] = gone[chosen["republished"]] = True
    first = np.flatnonzero(~gone)
    story.note("delivered", first, story.delivered[first], lease=INVISIBILITY_SECONDS)
    expired = np.flatnonzero(~gone & (hung | (free & (fate >= 0.002) & (fate < 0.02))))
    released = np.flatnonzero(free & (fate >= 0.02) & (fate < 0.04))
    rejected = np.flatnonzero(free & (fate >= 0.04) & (fate < 0.05))
    extended = np.flatnonzero(free & (fate >= 0.05) & (fate < 0.1))
    silent = np.zeros(count, np.bool_)
    for which in (expired, released, rejected, extended):
        silent[which] = True
    for name in ("stuck", "unanswered", "slept"):
        if name in chosen:
            silent[chosen[name]] = True
    _again(plan, chance, story, expired, released)
    _reject(plan, chance, messages, story, rejected)
    middle = story.delivered[extended] + (story.held[extended] * SECOND / 2).astype(np.int64)
    story.note("extended", extended, middle, held=story.held[extended] / 2, lease=INVISIBILITY_SECONDS)
    _ack(chance, story, extended, 1)
    _ack(chance, story, np.flatnonzero(~gone & ~silent), 1)
    _misdeeds(chance, story, chosen)
    if plan.troubles:
        _troubles(plan, chance, messages, story, chosen)
    return chosen


def _choose(plan: Plan, chance: np.random.Generator, messages: Messages, story: Story, plain: Bools) -> dict[str, Ints]:
    """Choose stories for each kind of fault, each for one only, from the middle of the journal."""
    at = story.delivered
    middle = plain & (at > messages.end // 10) & (at < messages.end * 6 // 10)
    chosen: dict[str, Ints] = {}
    pairs = _pairs(plan, chance, messages, story, middle)
    middle[pairs.ravel()] = False
    pool = chance.permutation(np.flatnonzero(middle))
    lines = _lines(plan, messages, story)
    for name in ("lost", "doubled", "acked_twice", "came_again", "stuck", *TROUBLES):
        wanted = plan.troubles if name in TROUBLES else getattr(plan, name)
        if wanted:
            chosen[name], pool = np.sort(pool[:wanted]), pool[wanted:]
        if name == "lost" and wanted:  # a message behind a lease of its key is not lost: none of these may last
            pool = pool[~np.isin(lines[pool], lines[chosen[name]]) | (lines[pool] < 0)]
    if "doubled" in chosen:  # ends that differ by less than the clocks' error prove nothing
        story.held[chosen["doubled"]] = np.maximum(story.held[chosen["doubled"]], 2.0)
    if len(pairs):
        earlier, later = pairs[:, 0], pairs[:, 1]
        at[earlier] = at[later] + SECOND
        chosen["reordered"] = earlier
    return chosen


def _lines(plan: Plan, messages: Messages, story: Story) -> Ints:
    """Return a number of its group and key for each story; -1 without a key."""
    key = messages.key[story.message]
    return np.where(key >= 0, key + story.group * plan.keys, -1)


def _pairs(plan: Plan, chance: np.random.Generator, messages: Messages, story: Story, free: Bools) -> Ints:
    """Return pairs of stories that follow each other in their key and are far enough apart, earlier and later one."""
    if not plan.reordered:
        return np.empty((0, 2), np.int64)
    key = _lines(plan, messages, story)
    order = np.lexsort((messages.published[story.message], key))
    earlier, later = order[:-1:2], order[1::2]
    apart = messages.published[story.message[later]] - messages.confirmed[story.message[earlier]]
    fits = (key[earlier] == key[later]) & (key[earlier] >= 0) & free[earlier] & free[later] & (apart > SECOND)
    found = np.flatnonzero(fits)
    picked = chance.permutation(found)[: plan.reordered]
    return np.stack([earlier[picked], later[picked]], axis=1)


def _ack(chance: np.random.Generator, story: Story, which: Ints, count: int) -> None:
    at = story.delivered[which] + (story.held[which] * SECOND).astype(np.int64)
    forwarded = chance.random(len(which)) < 0.1
    proxy = np.where(forwarded, chance.integers(0, len(PROXIES), len(which)), story.owner[which])
    story.note("acked", which, at, count, held=story.held[which], lease=INVISIBILITY_SECONDS, proxy=proxy)


def _again(plan: Plan, chance: np.random.Generator, story: Story, expired: Ints, released: Ints) -> None:
    """End their leases, and hand them to another client, for the second or third time."""
    for which, kind in ((expired, "expired"), (released, "released")):
        count = 1
        held = np.full(len(which), INVISIBILITY_SECONDS) if kind == "expired" else story.held[which]
        ended = story.delivered[which] + (held * SECOND).astype(np.int64) + (1_000 if kind == "expired" else 0)
        story.note(kind, which, ended, count, held=held, lease=INVISIBILITY_SECONDS)
        if kind == "expired":
            both = which[: plan.troubles]
            story.note(kind, both, ended[: plan.troubles] + 40_000, count, proxy=_other(story, both))
        while len(which):
            count += 1
            story.delivered[which] = ended + chance.integers(2_000, 90_000, len(which))
            share = chance.integers(0, plan.clients - 1, len(which))  # never the last one, which may still be open
            story.client[which] = story.group[which] * plan.clients + share
            story.note("delivered", which, story.delivered[which], count, lease=INVISIBILITY_SECONDS)
            is_over = chance.random(len(which)) < 0.9
            _ack(chance, story, which[is_over], count)
            which = which[~is_over]
            held = story.held[which] / 3
            ended = story.delivered[which] + (held * SECOND).astype(np.int64)
            story.note("released", which, ended, count, held=held, lease=INVISIBILITY_SECONDS)


def _reject(plan: Plan, chance: np.random.Generator, messages: Messages, story: Story, which: Ints) -> None:
    """Make them dead letters; some are redriven as new copies and acked, and some purged."""
    total = len(messages.published)
    at = story.delivered[which] + (story.held[which] * SECOND).astype(np.int64)
    story.note("rejected", which, at, held=story.held[which])
    # Each group of a message rejects it: two dead letters and two redriven copies have separate ids.
    letter = total * (1 + story.group[which]) + story.message[which]
    story.note("dead_lettered", which, at + 2_000, new=letter)
    both = which[: plan.troubles]
    again_at = at[: plan.troubles] + SECOND
    story.note("dead_lettered", both, again_at, new=letter[: plan.troubles], proxy=_other(story, both))
    share = chance.random(len(which))
    redriven, dropped = which[share < 0.4], share > 0.8
    fresh = total * 3 + story.message[redriven]
    later = at[share < 0.4] + chance.integers(60, 300, len(redriven)) * SECOND
    as_letter = Story(
        letter, story.group[which], at, story.held[which], np.full(len(which), -1), story.owner[which], story.rows
    )
    one_group = story.group[redriven] == 0  # the letters of the others stay where they are
    mine = np.flatnonzero(share < 0.4)[one_group]
    as_letter.note("redriven", mine, later[one_group], 0, new=fresh[one_group])
    as_letter.note(
        "redriven",
        mine[: plan.troubles],
        later[one_group][: plan.troubles] + 90 * SECOND,
        0,
        new=fresh[one_group][: plan.troubles],
    )
    purged = np.flatnonzero(dropped)
    as_letter.note("purged", purged, at[purged] + 600 * SECOND, 0)
    again = Story(
        fresh[one_group],
        story.group[redriven][one_group],
        later[one_group] + 30_000,
        story.held[redriven][one_group],
        story.client[redriven][one_group],
        story.owner[redriven][one_group],
        story.rows,
    )
    everyone = np.arange(len(again.message))
    again.note("delivered", everyone, again.delivered, lease=INVISIBILITY_SECONDS)
    _ack(chance, again, everyone, 1)


def _misdeeds(chance: np.random.Generator, story: Story, chosen: dict[str, Ints]) -> None:
    """Record faults that popgate does not admit, after the ordinary events of the same stories."""
    for name, which in chosen.items():
        other = story.group[which] * ((story.client.max() + 1) // len(GROUPS)) + chance.integers(0, 3, len(which))
        held = (story.held[which] * SECOND).astype(np.int64)
        if name == "doubled":  # a second client has it at the same time as the first
            story.note("delivered", which, story.delivered[which] + held // 2, 2, lease=30.0, client=other)
        elif name == "acked_twice":
            story.note("acked", which, story.delivered[which] + 2 * held + SECOND, 1, held=story.held[which] * 2 + 1)
        elif name == "came_again":
            at = story.delivered[which] + held + 5 * SECOND
            story.note("delivered", which, at, 2, lease=30.0, client=other)


def _other(story: Story, which: Ints) -> Ints:
    """Return proxies that do not own their queues, or no longer own them."""
    return (story.owner[which] + 1) % len(PROXIES)


def _troubles(
    plan: Plan, chance: np.random.Generator, messages: Messages, story: Story, chosen: dict[str, Ints]
) -> None:
    """Record what a failure leaves of ordinary stories: see `Plan.troubles`."""
    hours = messages.end * 3 // 10
    unanswered, repeated, long, slept, republished = (chosen[name] for name in TROUBLES)
    half = len(unanswered) // 2
    asked, ran_out = unanswered[:half], unanswered[half:]
    at = story.delivered[asked] + (story.held[asked] * SECOND).astype(np.int64) + 2 * SECOND
    story.note("found_settled", asked, at, proxy=_other(story, asked))
    ended = story.delivered[ran_out] + int(INVISIBILITY_SECONDS * SECOND) + 1_000
    story.note("expired", ran_out, ended, held=np.full(len(ran_out), INVISIBILITY_SECONDS))
    story.note("found_settled", ran_out, ended + chance.integers(1, 20, len(ran_out)) * SECOND)
    story.note("found_settled", repeated, story.delivered[repeated] + hours, proxy=_other(story, repeated))
    story.note("delivered", long, story.delivered[long], lease=hours / SECOND + 60.0)
    story.held[long] = hours / SECOND
    _ack(chance, story, long, 1)
    # The next owner ends the lease and grants another, which lasts, before the slow proxy learns of it.
    ended = story.delivered[slept] + int(INVISIBILITY_SECONDS * SECOND) + 1_000
    new_owner = _other(story, slept)
    story.note("expired", slept, ended, held=np.full(len(slept), INVISIBILITY_SECONDS), proxy=new_owner)
    story.note("delivered", slept, ended + SECOND, 2, lease=messages.end / SECOND, proxy=new_owner)
    story.note("expired", slept, ended + 60 * SECOND, held=np.full(len(slept), INVISIBILITY_SECONDS + 60.0))
    at = story.delivered[republished]
    story.note("discarded", republished, at + 40 * SECOND, 0)
    nobody = np.full(len(republished), -1)
    story.note("published", republished, at + 60 * SECOND, 0, client=nobody)
    story.rows[-1] = story.rows[-1]._replace(group=nobody)
    story.delivered[republished] = at + 60 * SECOND + 5_000
    story.note("delivered", republished, story.delivered[republished], lease=INVISIBILITY_SECONDS)
    _ack(chance, story, republished, 1)
