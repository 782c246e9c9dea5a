"""The history of each message while a consumer hung: the figures, from who took it when, and when it was settled.

Pure. Times are seconds since the run began.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

HUNG = 0
"""The consumer that hangs."""
NEVER = float("inf")


@dataclass(slots=True)
class Taking:
    consumer: int
    at: float
    settled: float = NEVER


@dataclass(slots=True)
class Fate:
    """The history of one message."""

    published: float
    takings: list[Taking] = field(default_factory=list[Taking])

    @property
    def settled(self) -> float:
        return min((taking.settled for taking in self.takings), default=NEVER)

    @property
    def is_held(self) -> bool:
        """Tell whether the hanging consumer has taken it, and not settled it."""
        return any(taking.consumer == HUNG and taking.settled == NEVER for taking in self.takings)

    def waits_held(self, end: float) -> list[float]:
        """Return how long it was with the hanging consumer, each time, until another consumer got it."""
        nexts = [*(taking.at for taking in self.takings[1:]), end]
        pairs = zip(self.takings, nexts, strict=True)
        return [after - taking.at for taking, after in pairs if taking.consumer == HUNG and taking.settled == NEVER]

    def wait(self, end: float) -> float:
        """Return how long until a consumer got it."""
        return (self.takings[0].at if self.takings else end) - self.published


class Fates:
    """The histories of all messages of a run, by their numbers."""

    def __init__(self) -> None:
        self._all: dict[int, Fate] = {}

    def published(self, number: int, at: float) -> None:
        """Record a message before it is published."""
        self._all[number] = Fate(at)

    def taken(self, numbers: Iterable[int], consumer: int, at: float) -> list[Taking]:
        takings: list[Taking] = []
        for number in numbers:
            takings.append(Taking(consumer, at))
            self._all[number].takings.append(takings[-1])
        return takings

    def summary(self, *, hangs_at: float, end: float) -> "Summary":
        held = [fate for fate in self._all.values() if fate.is_held]
        waits = [wait for fate in held for wait in fate.waits_held(end)]
        others = [fate.wait(end) for fate in self._all.values() if not fate.is_held]
        before = [fate.wait(end) for fate in self._all.values() if fate.published < hangs_at and not fate.is_held]
        samples = self.samples(end, 0.1)
        return Summary(
            published=len(self._all),
            held=len(held),
            still_held=sum(fate.settled == NEVER for fate in held),
            held_wait_seconds_max=max(waits, default=0.0),
            other_wait_seconds_max=max(others, default=0.0),
            wait_before_seconds_max=max(before, default=0.0),
            oldest_seconds_max=max(sample.oldest_seconds for sample in samples),
            oldest_seconds_at_end=samples[-1].oldest_seconds,
            backlog_max=max(sample.backlog for sample in samples),
            backlog_at_end=samples[-1].backlog,
        )

    def samples(self, end: float, every_seconds: float) -> "list[Sample]":
        """Return the age of the oldest unsettled message, and the number of unsettled ones, over time."""
        count = round(end / every_seconds)
        times = [step * every_seconds for step in range(count + 1)]
        open_at: defaultdict[float, list[float]] = defaultdict(list)
        for fate in self._all.values():
            for at in times[max(0, int(fate.published / every_seconds)) :]:
                if at >= fate.settled:
                    break
                if at >= fate.published:
                    open_at[at].append(at - fate.published)
        return [Sample(at, max(open_at[at], default=0.0), len(open_at[at])) for at in times]


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    oldest_seconds: float
    backlog: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``held``: messages that the hung consumer took and did not settle; ``still_held``: those that no consumer
    settled until the end. ``held_wait``: from there until another consumer got the message; ``other_wait``: from
    publish to the first hand-out, of messages that the hung consumer did not hold; ``wait_before`` the same while it
    still worked.
    """

    published: int
    held: int
    still_held: int
    held_wait_seconds_max: float
    other_wait_seconds_max: float
    wait_before_seconds_max: float
    oldest_seconds_max: float
    oldest_seconds_at_end: float
    backlog_max: int
    backlog_at_end: int


def as_json(summary: Summary, samples: Sequence[Sample]) -> dict[str, Any]:
    rounded = {name: round(value, 3) for name, value in asdict(summary).items()}
    return {**rounded, "samples": [[round(one.at, 2), round(one.oldest_seconds, 2), one.backlog] for one in samples]}
