"""Reads the figures of all subscriptions, and computes rates from two successive readings.

The counts of waiting messages come from the states of the subscriptions, and are those of the whole cluster. The
events and the waiting pops are sums over ``/metrics`` of all proxies, which needs the permission ``metrics``. If they
can't be read, rates and pollers are unknown (None). So are those of groups that share one row of ``/metrics``, because
there are more groups than ``--metrics-groups-max``.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import quote

from popgate_client import Client, GroupNotFound, PopgateError, TopicNotFound
from popgate_client.exchange import Attempt, Exchange
from popgate_client.wire import Request, accepted

REQUESTS_MAX = 8
"""Maximum number of requests at the same time."""
OUT, GONE, BACK = "acked", ("acked", "dead_lettered", "purged", "discarded"), "redriven"
"""Kinds of events: messages that clients have processed, that have left a group, and that came back to it."""

PUBLISHED = "published"
OTHERS = "(other)"
"""The topic of the row of ``/metrics`` that groups without rows of their own share."""

Name: TypeAlias = tuple[str, str]
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures at one time. ``events`` is None if they could not be read.

    The published messages of a topic are those of the group with an empty name.
    """

    at: float
    states: Mapping[Name, Row]
    events: Mapping[tuple[Name, str], float] | None = None
    pollers: Mapping[Name, float] = field(default_factory=dict[Name, float])
    adopted: frozenset[str] = frozenset()

    def has_row(self, name: Name) -> bool:
        """Return whether the group has rows of its own in ``/metrics``: each such group has a number of pollers."""
        return name in self.pollers

    def published(self, topic: str) -> float | None:
        """Return how many messages were published to a topic, or None if this may be counted with other topics."""
        events = self.events or {}
        count = events.get(((topic, ""), PUBLISHED))
        return 0.0 if count is None and ((OTHERS, ""), PUBLISHED) not in events else count

    def left(self, name: Name) -> float:
        """Return how many messages have left the group, less those that came back."""
        events = self.events or {}
        return sum(events.get((name, kind), 0.0) for kind in GONE) - events.get((name, BACK), 0.0)


def read_figures(client: Client, topic: str | None, group: str | None) -> Reading:
    """Return the figures of all subscriptions, or of those of one topic, or of one group. Raises: PopgateError."""
    topics = client.list_topics() if topic is None else [client.get_topic(topic)]
    names = [(one["topic"], name) for one in topics for name in one["groups"] if group in (None, name)]
    if group is not None and topic is not None and not names:
        client.stats(topic, group)  # raises GroupNotFound
    with ThreadPoolExecutor(REQUESTS_MAX) as threads:
        states = dict(zip(names, threads.map(partial(_state, client), names), strict=True))
    present = {name: state for name, state in states.items() if state is not None}
    adopted = frozenset(one["topic"] for one in topics if one.get("adopted"))
    try:
        events, pollers = _sums(_metrics(client))
    except PopgateError:
        return Reading(time.monotonic(), present, adopted=adopted)
    return Reading(time.monotonic(), present, events, pollers, adopted)


def _state(client: Client, name: Name) -> Row | None:
    """Return the state of a subscription, or None if it has just been deleted."""
    try:
        return client.stats(*name)
    except (TopicNotFound, GroupNotFound):
        return None


def _metrics(client: Client) -> list[str]:
    members: Sequence[Row] = client.cluster()["members"]
    proxies = [member["instance"] for member in members]
    paths = [f"/metrics?proxy={quote(proxy, safe='')}" for proxy in proxies] if len(proxies) > 1 else ["/metrics"]
    return [client.perform(_text(path)) for path in paths]


def _text(path: str) -> Exchange[str]:
    reply = yield Attempt(Request(method="GET", path=path))
    return accepted(reply).text


def _sums(texts: Sequence[str]) -> tuple[dict[tuple[Name, str], float], dict[Name, float]]:
    """Return the counted events and the waiting pops of each subscription, added up over all proxies.

    The waiting pops are those of the subscriptions that have a row at each proxy.
    """
    from prometheus_client.parser import text_string_to_metric_families  # slow to load

    events: dict[tuple[Name, str], float] = {}
    pollers: dict[Name, list[float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = (sample.labels.get("topic", ""), sample.labels.get("group", ""))
                if sample.name == "popgate_events_total":
                    kind = (name, sample.labels.get("kind", ""))
                    events[kind] = events.get(kind, 0.0) + sample.value
                elif sample.name == "popgate_parked_pops":
                    pollers.setdefault(name, []).append(sample.value)
    return events, {name: sum(counts) for name, counts in pollers.items() if len(counts) == len(texts)}


def rows_of(before: Reading | None, now: Reading) -> list[Row]:
    """Return one row for each subscription. Without an earlier reading, the rates are None."""
    rows: list[Row] = []
    for name, state in now.states.items():
        topic, group = name
        rates: tuple[float | None, float | None] = (None, None)
        if before is not None:
            rates = _rates(before, now, name)
        counts = {key: state[key] for key in ("mode", "ready", "blocked", "in_flight", "delayed", "dead")}
        rows.append(
            {
                "topic": topic,
                "group": group,
                **counts,
                "oldest_age_seconds": state.get("oldest_age_seconds"),
                "in_per_second": rates[0],
                "out_per_second": rates[1],
                "pollers": round(now.pollers[name]) if now.has_row(name) else None,
            }
        )
    return rows


def _rates(before: Reading, now: Reading, name: Name) -> tuple[float | None, float | None]:
    """Return how many messages per second came and were acked; None if a count is unknown, or began again at 0 because
    a proxy was started or the group was created.

    popgate does not see what is published to adopted queues. What came to them is what is there more, plus what left.
    """
    seconds = now.at - before.at
    if before.events is None or now.events is None or name not in before.states or seconds <= 0:
        return None, None
    gone = came = None
    has_rows = before.has_row(name) and now.has_row(name)
    if has_rows:
        gone = now.events.get((name, OUT), 0.0) - before.events.get((name, OUT), 0.0)
    if name[0] not in now.adopted:
        then, published = before.published(name[0]), now.published(name[0])
        came = None if then is None or published is None else published - then
    elif has_rows:
        came = max(0.0, _present(now, name) - _present(before, name) + now.left(name) - before.left(name))
    return _each_second(came, seconds), _each_second(gone, seconds)


def _each_second(count: float | None, seconds: float) -> float | None:
    return None if count is None or count < 0 else count / seconds


def _present(reading: Reading, name: Name) -> float:
    state = reading.states[name]
    return float(state["ready"] + state["in_flight"] + state["delayed"])
