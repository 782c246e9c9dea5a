"""Carries out the settlements in the request of a pop, and adds their results to its answer.

The settlements come first, so that the pop can get messages that they make available. But if enough messages are ready
in any case, the pop is decided right after the settlements, and all these decisions become durable with one write.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from popgate.api import answers
from popgate.api.formats import Format
from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.engine.engine import Engine
from popgate.engine.lease.pop_request import PopRequest
from popgate.engine.settle.orders import UNAVAILABLE, SettleOrder, SettleResult, Verb
from popgate.ports.peers import ForwardedAnswer
from popgate.runtime.current_request import carried

_OK = 200

Results = dict[str, Any]
"""The results of the settlements (a list of ``SettleResult``), by the name of the field in the answer."""


class _Forwarded(Struct):
    """Another proxy's answer to a pop, with the results of this proxy's settlements."""

    messages: msgspec.Raw
    ack: list[answers.SettleResult] | UnsetType = UNSET
    release: list[answers.SettleResult] | UnsetType = UNSET
    extend: list[answers.SettleResult] | UnsetType = UNSET
    reject: list[answers.SettleResult] | UnsetType = UNSET


_in_json, _packed = msgspec.json.Decoder(_Forwarded).decode, msgspec.msgpack.Decoder(_Forwarded).decode


class PopSettlements:
    """The settlements (``orders``) in one request of a pop. ``begin`` must be called before the pop, and ``results``
    after it."""

    def __init__(self, engine: Engine, topic: str, group: str, orders: Mapping[Verb, Sequence[SettleOrder]]) -> None:
        self._engine = engine
        self._topic, self._group = topic, group
        self._orders = orders
        self._tasks: dict[Verb, asyncio.Task[list[SettleResult]]] = {}

    async def begin(self, request: PopRequest) -> PopRequest:
        """Carry out the settlements. If the pop gets enough messages in any case, only decide about them.

        Return the pop, which does not wait if the client must repeat a settlement. Raises: the errors of
        ``Engine.settle``.
        """
        for verb, orders in self._orders.items():
            settlement = self._engine.settle(self._topic, self._group, verb, orders)
            self._tasks[verb] = asyncio.create_task(carried(settlement))
        served = self._engine.topics.served.get(Subscription(TopicName(self._topic), GroupName(self._group)))
        if served is not None and served.serving.has_plenty(request):
            await asyncio.sleep(0)
            return request
        statuses = {one.status for many in await self._all() for one in many}
        return replace(request, wait_seconds=0.0) if UNAVAILABLE.status in statuses else request

    async def results(self) -> Results:
        """Return the results when the settlements are durable. Raises: the errors of ``Engine.settle``."""
        found = await self._all()
        return {verb.value: [settle_result(one) for one in many] for verb, many in zip(self._tasks, found, strict=True)}

    async def ended(self) -> None:
        """Wait until the settlements have ended, after a pop that failed. Never fails."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _all(self) -> list[list[SettleResult]]:
        if len(self._tasks) > 1:
            return await asyncio.gather(*self._tasks.values())
        return [await task for task in self._tasks.values()]  # usually one, which needs no further future


def with_results(answer: ForwardedAnswer, results: Results, form: Format) -> ForwardedAnswer:
    """Return another proxy's answer with the results of this proxy's settlements."""
    if answer.status != _OK or not results:
        return answer
    given = (_packed if form.answer_packed else _in_json)(answer.body)
    return answer._replace(body=form.encode(_Forwarded(given.messages, **results)))


def settle_result(one: SettleResult) -> answers.SettleResult:
    until = one.invisible_until
    return answers.SettleResult(one.status, UNSET if until is None else until)
