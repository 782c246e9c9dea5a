"""Concludes from the standing of a group why a pop gets no message, and what helps.

Pure. Each rule looks at one possible reason. The reasons that end every pop come first, then the reasons for which
messages wait, then the reasons that concern only some pops.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from popgate.domain.standing import BlockingMessage, GroupStanding, ProxyStanding, QueueStanding
from popgate.domain.topics import ConsumeMode

NAMED_MAX = 5
"""Maximum number of queues, keys or proxies that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a pop gets no message. ``code`` is stable. ``detail`` and ``remedy`` are sentences for people.

    ``queues``: the queues that are concerned; empty: all. ``until``: when the reason ends by itself, in Unix seconds,
    if this is known. ``stops_all``: whether no pop of the group gets a message because of it.
    """

    code: str
    detail: str
    remedy: str
    queues: Sequence[int] = ()
    until: float | None = None
    stops_all: bool = field(default=True)


def available(group: GroupStanding) -> int:
    """Count the messages that a pop without a filter may get now, in memory and at the broker."""
    return sum(queue.ready + (_at_broker(queue) if _is_usable(queue) else 0) for queue in group.queues)


def reasons(group: GroupStanding) -> list[Reason]:
    """Return all reasons why a pop gets no message, the most important first.

    The list is empty if a pop gets a message. It may contain reasons that concern only some queues or some pops.
    """
    found = [reason for rule in _DECISIVE for reason in rule(group)]
    if any(reason.stops_all for reason in found) or available(group):
        return [*found, *_filters(group)]
    return [*found, *_waiting(group), *_filters(group)]


def _at_broker(queue: QueueStanding) -> int:
    return queue.not_shown or 0


def _is_usable(queue: QueueStanding) -> bool:
    is_stopped_by_keys = queue.blocked > 0 and not queue.ready and queue.is_paused
    return queue.exists and queue.is_claimed and not (queue.trouble or queue.is_sorting or is_stopped_by_keys)


# -- reasons for which no message is handed out, even if some wait ----------------------------------------------------


def _stopping(group: GroupStanding) -> Iterator[Reason]:
    names = [proxy.proxy for proxy in group.proxies if proxy.is_stopping]
    if names:
        yield Reason(
            code="proxy_stopping",
            detail=f"{_proxies(names)} shutting down, and refuses pops.",
            remedy="Pop from another proxy, or wait for the restart. Another proxy takes the queues over.",
            queues=_queues_of(proxy for proxy in group.proxies if proxy.is_stopping),
            stops_all=_own_all(group, names),
        )


def _broker_away(group: GroupStanding) -> Iterator[Reason]:
    yield from _away(
        group,
        "broker_unavailable",
        "the broker",
        lambda proxy: proxy.broker_trouble,
        "Check that the broker runs, and that the proxy can reach it. popgate connects again by itself. "
        "'popgate doctor' checks the broker.",
    )


def _store_away(group: GroupStanding) -> Iterator[Reason]:
    yield from _away(
        group,
        "state_unavailable",
        "the state store",
        lambda proxy: proxy.store_trouble,
        "Check that the state store (Redis, or the data folder's disk) works. popgate goes on by itself.",
    )


def _away(
    group: GroupStanding, code: str, what: str, trouble_of: Callable[[ProxyStanding], str | None], remedy: str
) -> Iterator[Reason]:
    away = [(proxy, trouble) for proxy in group.proxies if (trouble := trouble_of(proxy)) is not None]
    if away:
        names = ", ".join(proxy.proxy for proxy, _ in away[:NAMED_MAX])
        yield Reason(
            code=code,
            detail=f"{what[0].upper()}{what[1:]} can't be used by proxy {names}: {away[0][1]}.",
            remedy=remedy,
            queues=_queues_of(proxy for proxy, _ in away),
            stops_all=_own_all(group, [proxy.proxy for proxy, _ in away]),
        )


def _mode(group: GroupStanding) -> Iterator[Reason]:
    if group.mode == ConsumeMode.PULL:
        yield Reason(
            code="pull_mode",
            detail="The group is in pull mode: pops are refused, and pull clients read whole queues.",
            remedy=f"Use pull clients, or switch the group with: popgate mode {group.topic} {group.group} pop",
        )
    elif group.mode == ConsumeMode.DRAINING:
        yield Reason(
            code="draining",
            detail="The group is changing its consume mode, and hands out no messages until its leases have ended.",
            remedy=f"Wait for its end, which this shows: popgate mode {group.topic} {group.group}",
        )


def _paused(group: GroupStanding) -> Iterator[Reason]:
    if group.paused:
        yield Reason(
            code="paused",
            detail="The group is paused: no message is handed out. Leased messages can still be settled.",
            remedy=f"Resume it with: popgate groups resume {group.topic} {group.group}",
        )


def _full(group: GroupStanding) -> Iterator[Reason]:
    leased = sum(queue.leased for queue in group.queues)
    if group.max_in_flight is not None and leased >= group.max_in_flight:
        yield Reason(
            code="max_in_flight",
            detail=f"{_many(leased, 'message')} in flight, and the group's max_in_flight is {group.max_in_flight}.",
            remedy="Let the clients ack or release messages, wait until leases expire, or raise the limit with: "
            f"popgate groups policy {group.topic} {group.group} --max-in-flight N",
            until=_first([queue.next_at for queue in group.queues if queue.leased]),
        )


def _no_owner(group: GroupStanding) -> Iterator[Reason]:
    if group.unowned:
        names = ", ".join(one.broker_queue for one in group.unowned[:NAMED_MAX])
        yield Reason(
            code="no_owner",
            detail=f"No proxy owns {_many(len(group.unowned), 'queue', verb=False)}: {names}.",
            remedy="A proxy takes such a queue within seconds after the former owner has died. If none does, check "
            "that the proxies reach the state store, and that one of them owns queues (popgate cluster).",
            queues=[one.queue for one in group.unowned],
            stops_all=not group.queues and not _are_elsewhere(group),
        )


def _unreachable(group: GroupStanding) -> Iterator[Reason]:
    if group.unreachable:
        named = "; ".join(f"{one.proxy} ({one.detail})" for one in group.unreachable[:NAMED_MAX])
        yield Reason(
            code="proxy_unreachable",
            detail=f"{_many(len(group.unreachable), 'proxy', 'proxies')} not reachable: {named}.",
            remedy="Check the proxy's process and the network between the proxies. If the proxy has died, the others "
            "take its queues over within seconds.",
            queues=[queue for one in group.unreachable for queue in one.queues],
            stops_all=not group.queues,
        )


def _missing(group: GroupStanding) -> Iterator[Reason]:
    missing = [queue for queue in group.queues if not queue.exists]
    if missing:
        names = ", ".join(queue.broker_queue for queue in missing[:NAMED_MAX])
        yield Reason(
            code="queue_missing",
            detail=f"{_many(len(missing), 'queue')} missing on the broker: {names}.",
            remedy="An administrator declares popgate's own queues again with: "
            f"popgate groups create {group.topic} {group.group}",
            queues=_numbers(missing),
        )


def _not_claimed(group: GroupStanding) -> Iterator[Reason]:
    waiting = [queue for queue in group.queues if not queue.is_claimed]
    if waiting:
        yield Reason(
            code="not_claimed",
            detail=f"The owner of {_many(len(waiting), 'queue', verb=False)} has not read the lease records from the "
            "state store yet.",
            remedy="This takes a moment after a start or a failure of the store. If it lasts, read the proxy's log.",
            queues=_numbers(waiting),
            stops_all=len(waiting) == len(group.queues),
        )


def _not_consumed(group: GroupStanding) -> Iterator[Reason]:
    connected = [proxy for proxy in group.proxies if proxy.broker_trouble is None]  # the others have said why
    troubled = [queue for proxy in connected for queue in proxy.queues if queue.trouble]
    if troubled:
        yield Reason(
            code="queue_not_consumed",
            detail=f"{_many(len(troubled), 'queue')} not consumed: {troubled[0].trouble}.",
            remedy="Remove the cause: for example, stop the other program that consumes the queue. popgate tries again "
            "as long as pops ask for messages.",
            queues=_numbers(troubled),
            stops_all=len(troubled) == len(group.queues),
        )


_DECISIVE = (
    *(_stopping, _broker_away, _store_away, _mode, _paused, _full),
    *(_missing, _no_owner, _unreachable, _not_claimed, _not_consumed),
)


# -- reasons why no message is available ------------------------------------------------------------------------------


def _waiting(group: GroupStanding) -> Iterator[Reason]:
    yield from _sorting(group)
    yield from _blocked(group)
    yield from _delayed(group)
    yield from _leased(group)
    yield from _moving(group)
    yield from _set_aside(group)
    counted = [queue for queue in group.queues if queue.exists]
    is_empty = not any(
        (queue.blocked, queue.leased, queue.delayed, queue.moving, queue.set_aside, queue.delayed_at_broker)
        != (0, 0, 0, 0, 0, 0)
        or _at_broker(queue)
        for queue in counted
    )
    if counted and is_empty:
        redrive = f" Redrive dead letters with: popgate dead-letters redrive {group.topic} {group.group}"
        yield Reason(
            code="empty",
            detail=f"The group has no messages, except {group.dead} dead."
            if group.dead
            else "The group has no messages.",
            remedy="Check that publishers publish to this topic. Messages that were published before the group was "
            "created are not in the group." + (redrive if group.dead else ""),
        )


def _sorting(group: GroupStanding) -> Iterator[Reason]:
    sorting = [queue for queue in group.queues if queue.is_sorting]
    if sorting:
        yield Reason(
            code="sorting",
            detail=f"The owner of {_many(len(sorting), 'queue', verb=False)} waits until the broker has redelivered "
            "all returned messages, because it must hand out ordering keys in order.",
            remedy="Wait: this takes a moment after a new owner has taken the queue.",
            queues=_numbers(sorting),
        )


def _blocked(group: GroupStanding) -> Iterator[Reason]:
    blocked = [queue for queue in group.queues if queue.blocked]
    if not blocked:
        return
    count = sum(queue.blocked for queue in blocked)
    unread = sum(_at_broker(queue) for queue in blocked if queue.is_paused)
    rest = f" {_many(unread, 'more message')} at the broker, and can't be read before." if unread else ""
    heads = [one for queue in blocked for one in queue.blocking]
    behind = "; ".join(_head(one) for one in heads[:NAMED_MAX]) or "an earlier message of their ordering key"
    yield Reason(
        code="blocked_by_key",
        detail=f"{_many(count, 'message')} waiting behind an earlier message of the same ordering key: {behind}.{rest}",
        remedy="Settle the first message of the key: its client must ack, release or reject it, or its lease must "
        "expire. Messages with other keys, or without one, are not blocked.",
        queues=_numbers(blocked),
        until=_first([one.until for one in heads]),
    )


def _head(one: BlockingMessage) -> str:
    name = one.message_id or one.id
    key = "" if one.ordering_key is None else f" of key {one.ordering_key!r}"
    by = f" by {one.client}" if one.client else ""
    return f"message {name}{key} is {one.state}{by}"


def _delayed(group: GroupStanding) -> Iterator[Reason]:
    delayed = [queue for queue in group.queues if queue.delayed or queue.delayed_at_broker]
    count = sum(queue.delayed + queue.delayed_at_broker for queue in delayed)
    if delayed:
        yield Reason(
            code="delayed",
            detail=f"{_many(count, 'message')} delayed, by their publishers or until their next attempt.",
            remedy="Wait until the delay is over. The policy's retry, and delay_seconds of a release or a publish, set "
            "the delay.",
            queues=_numbers(delayed),
            until=_first([queue.next_at for queue in delayed if not queue.leased]),
        )


def _leased(group: GroupStanding) -> Iterator[Reason]:
    leased = [queue for queue in group.queues if queue.leased]
    if leased:
        yield Reason(
            code="all_leased",
            detail=f"{_total(leased, 'leased')} leased to clients; no other is available.",
            remedy="Wait until the clients have settled them, or until their leases expire. These show the leases: "
            f"popgate peek {group.topic} {group.group} --state leased",
            queues=_numbers(leased),
            until=_first([queue.next_at for queue in leased]),
        )


def _moving(group: GroupStanding) -> Iterator[Reason]:
    moving = [queue for queue in group.queues if queue.moving]
    if moving:
        yield Reason(
            code="moving",
            detail=f"{_total(moving, 'moving')} being moved to the dead letters.",
            remedy="Wait. If it lasts, the broker refuses the dead letters: read the proxy's log.",
            queues=_numbers(moving),
        )


def _set_aside(group: GroupStanding) -> Iterator[Reason]:
    stuck = [queue for queue in group.queues if queue.set_aside]
    if stuck:
        yield Reason(
            code="set_aside",
            detail=f"{_total(stuck, 'set_aside')} set aside: popgate can neither process nor dead-letter them.",
            remedy="Read the proxy's log, which names each of them, and report it as a bug.",
            queues=_numbers(stuck),
        )


def _filters(group: GroupStanding) -> Iterator[Reason]:
    """Pops with filters wait, although messages are ready. A proxy compares only the messages of its own queues."""
    count = sum(proxy.filtered_pops for proxy in group.proxies)
    passes = [proxy.filters_pass for proxy in group.proxies if proxy.filters_pass is not None]
    if not count or any(passes) or not any(queue.ready for queue in group.queues):
        return
    none = "none of the first ready messages passes one" if passes else "probably none of the ready messages passes one"
    yield Reason(
        code="filters",
        detail=f"{_many(count, 'pop')} waiting with a filter, and {none}.",
        remedy="Pop without a filter, correct the filters, or start consumers for the other messages: they stay in "
        "front, and take up the room for messages in memory.",
        stops_all=False,
    )


def _own_all(group: GroupStanding, names: Sequence[str]) -> bool:
    """Whether the proxies with these names own all queues that have an owner."""
    return all(proxy.proxy in names or not proxy.queues for proxy in group.proxies) and not _are_elsewhere(group)


def _are_elsewhere(group: GroupStanding) -> bool:
    """Whether proxies that have not answered own queues of the group."""
    return any(one.queues for one in group.unreachable)


def _total(queues: Iterable[QueueStanding], field: str) -> str:
    return _many(sum(getattr(queue, field) for queue in queues), "message")


def _numbers(queues: Iterable[QueueStanding]) -> list[int]:
    return [queue.queue for queue in queues]


def _queues_of(proxies: Iterable[ProxyStanding]) -> list[int]:
    return sorted(queue.queue for proxy in proxies for queue in proxy.queues)


def _first(times: Iterable[float | None]) -> float | None:
    return min((at for at in times if at is not None), default=None)


def _proxies(names: Sequence[str]) -> str:
    return f"Proxy {names[0]} is" if len(names) == 1 else f"Proxies {', '.join(names[:NAMED_MAX])} are"


def _many(count: int, what: str, plural: str = "", *, verb: bool = True) -> str:
    """Return for example ``1 queue is`` or ``3 queues are``; without the verb if ``verb`` is False."""
    name = what if count == 1 else plural or f"{what}s"
    return f"{count} {name}" + (f" {'is' if count == 1 else 'are'}" if verb else "")
