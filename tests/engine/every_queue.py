"""Looks at every queue of a group, where popgate looks only at the queues in ``LackingQueues``.

A queue that is missing there would never be opened or widened, and pops would wait although it has messages.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.channel_opener import ChannelOpener
from popgate.engine.queue.host import QueueHost
from popgate.engine.queue.lacking_queues import LackingQueues


def faults_of(hosts: Sequence[QueueHost], lacking: LackingQueues) -> list[str]:
    """Return what is missing in ``lacking``, whose numbers must be complete at this moment."""
    faults: list[str] = []
    for host in hosts:
        number = host.queue.number
        if host.is_owned and host.listener is None and number not in lacking.unopened:
            faults.append(f"{host.broker_queue} would never be opened")
        if number in lacking.constrained:
            continue
        if host.state.flow.is_half_full:
            faults.append(f"{host.broker_queue} keeps more than half of its memory share")
        before = _flow(host)
        host.prefetch.widen()
        if _flow(host) != before:
            faults.append(f"{host.broker_queue} would not be widened: {before} would become {_flow(host)}")
    return faults


def _flow(host: QueueHost) -> dict[str, Any]:
    flow = dict(vars(host.state.flow))
    return {**flow, "_window": flow["_window"].prefetch}


@contextmanager
def watched() -> Generator[list[str]]:
    """Compare wherever popgate reads the lists. Return the faults, which grow until the context ends."""
    faults: list[str] = []
    constrained, open_queues = ServedGroup.constrained, ChannelOpener.open

    def checked_constrained(group: ServedGroup) -> list[QueueHost]:
        found = constrained(group)
        faults.extend(faults_of(group.hosts, vars(group)["_lacking"]))
        return found

    def checked_open(opener: ChannelOpener) -> None:
        open_queues(opener)
        hosts: Sequence[QueueHost] = vars(opener)["_hosts"]
        unopened: set[int] = vars(opener)["_unopened"]
        for host in hosts:
            if host.is_owned and host.listener is None and host.queue.number not in unopened:
                faults.append(f"{host.broker_queue} would never be opened")

    with (
        mock.patch.object(ServedGroup, "constrained", checked_constrained),
        mock.patch.object(ChannelOpener, "open", checked_open),
    ):
        yield faults
