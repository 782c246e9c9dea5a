"""Serves the data plane: publish, pop, ack, release, extend and reject (decision 1).

Each handler reads a body, calls the engine once and encodes the result. Only ``app`` handles ASGI.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from msgspec import UNSET, Struct

from popgate.api import answers, reading
from popgate.api.formats import Format, Reader
from popgate.api.forwarded_pops import forwarder, found_here, nothing_here, receipts_of, without_settlements
from popgate.api.message_encoder import MessageEncoder
from popgate.api.paths import GROUP, TOPIC
from popgate.api.pop_settlements import PopSettlements, Results, settle_result, with_results
from popgate.api.requests import REQUEST_BYTES_MAX, PopRequestBody
from popgate.api.routes import Call, Route
from popgate.domain.errors import PopgateError
from popgate.domain.topics import Policy
from popgate.engine.engine import Engine
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.publish.publishing import Published
from popgate.engine.settle.orders import SettleOrder, Verb
from popgate.ports.peers import ForwardedAnswer, Peers

RequestT = TypeVar("RequestT", bound=Struct)


class Native:
    """The handlers of the data plane for one engine. ``peers`` are the other proxies of a cluster, which answer pops
    for which this proxy has no messages."""

    def __init__(self, engine: Engine, peers: Peers | None = None) -> None:
        self._engine = engine
        self._peers = peers

    def routes(self) -> Iterator[Route]:
        """Return the routes of the data plane."""
        yield Route("publish", "POST", f"{TOPIC}/messages", self.publish, bytes_max=REQUEST_BYTES_MAX)
        yield Route("pop", "POST", f"{GROUP}/pop", self.pop)
        yield self._settling(Verb.ACK, reading.ACK, reading.ack_orders)
        yield self._settling(Verb.RELEASE, reading.RELEASE, reading.release_orders)
        yield self._settling(Verb.EXTEND, reading.EXTEND, reading.extend_orders)
        yield self._settling(Verb.REJECT, reading.REJECT, reading.reject_orders)

    async def publish(self, call: Call) -> bytes:
        (topic,), form = call.path, call.form
        messages = reading.new_messages(reading.PUBLISH.read(call.body, form.packed), self._engine.quotas)
        results = await self._engine.publish(topic, messages, call.permit)
        return form.encode(answers.PublishAnswer([_publish_result(one) for one in results]))

    async def pop(self, call: Call) -> bytes | ForwardedAnswer:
        (topic, group), form, connection, forwarding = call.path, call.form, call.connection, call.forwarding
        asked = reading.POP.read(call.body, form.packed) if call.body else PopRequestBody()
        request = reading.pop_request(asked, self._engine.quotas, packed=form.answer_packed)
        if forwarding is not None and forwarding.wait_seconds is not None:
            client = forwarding.client_id or request.client
            request = replace(request, wait_seconds=forwarding.wait_seconds, client=client)
        if request.attempt_id is not None and call.visit is not None:
            request = replace(request, attempt_id=call.visit.own_name(request.attempt_id))
        if request.wait_seconds:
            call.check_may_wait()
        arrivals = 0 if forwarding is None else self._engine.arrivals(topic, group)
        orders = reading.settlements(asked)
        presence = Presence()
        if connection is not None and connection.gone:
            return form.encode(answers.PopAnswer([]))
        if connection is not None:
            connection.presence = presence
        settlements = PopSettlements(self._engine, topic, group, orders) if orders else None
        if settlements is not None:
            request = await settlements.begin(request)
        try:
            if request.wait_seconds:
                call.park()
            if call.scope is None or self._peers is None:
                found: list[Leased] | ForwardedAnswer = await self._engine.pop(
                    topic, group, request, presence, call.permit
                )
            else:
                body = call.body if settlements is None else without_settlements(call.body, form)
                forward = forwarder(self._peers, call.scope, body, request.client)
                found = await self._engine.pop_anywhere(topic, group, request, presence, forward, call.permit)
        except Exception:
            if settlements is not None:
                await settlements.ended()
            raise
        finally:
            if connection is not None:
                connection.presence = None
        results = _NO_RESULTS if settlements is None else await self._results(settlements, call, request, found)
        if not found:
            call.check()
        if connection is not None and found and request.attempt_id is None:
            # Until a later request proves that the answer was read, its receipt handles stay in memory, not its bodies.
            connection.answering(partial(self._engine.abandon_soon, topic, group, _receipts(found, form)))
        if isinstance(found, ForwardedAnswer):
            return with_results(found, results, form)
        encoder = MessageEncoder(
            popped_packed if form.answer_packed else popped_in_json,
            form.encode,
            partial(self._engine.message_failed, topic, group),
        )
        answer = encoder.many(found, partial(answers.PopAnswer, **results))
        return answer if forwarding is None else self._passed_back(call, found, answer, arrivals)

    def _passed_back(self, call: Call, found: list[Leased], answer: bytes, arrivals: int) -> ForwardedAnswer:
        """Return the answer to a pop that another proxy has forwarded."""
        if not found:
            return nothing_here(call.form, answer, arrivals)
        topic, group = call.path
        return found_here(call.form, answer, self._engine.peering.waited_seconds(topic, group, found[0].message))

    async def _results(
        self, settlements: PopSettlements, call: Call, request: PopRequest, found: list[Leased] | ForwardedAnswer
    ) -> Results:
        """Return the results of the settlements. If they fail, release what was found, unless the client can repeat the
        pop."""
        try:
            return await settlements.results()
        except PopgateError:
            if request.attempt_id is None:
                topic, group = call.path
                self._engine.abandon_soon(topic, group, _receipts(found, call.form))
            raise

    def _settling(
        self, verb: Verb, reader: Reader[RequestT], orders: Callable[[RequestT], Sequence[SettleOrder]]
    ) -> Route:
        async def settle(call: Call) -> bytes:
            topic, group = call.path
            asked = orders(reader.read(call.body, call.form.packed))
            results = await self._engine.settle(topic, group, verb, asked)
            return call.form.encode(answers.SettleAnswer([settle_result(one) for one in results]))

        return Route(verb, "POST", f"{GROUP}/{verb}", settle)


_NO_RESULTS: Results = {}


def _receipts(found: "list[Leased] | ForwardedAnswer", form: Format) -> list[str]:
    """Return the receipt handles in the answer that is sent to the client."""
    if isinstance(found, ForwardedAnswer):
        return receipts_of(found, form)
    return [one.receipt_handle for one in found]


def policy_state(policy: Policy) -> answers.PolicyState:
    retry = policy.retry
    return answers.PolicyState(
        invisibility_seconds=policy.invisibility_seconds,
        max_lease_seconds=policy.max_lease_seconds,
        max_deliveries=policy.max_deliveries,
        retry=answers.RetryState(
            initial_seconds=retry.initial_seconds, multiplier=retry.multiplier, max_seconds=retry.max_seconds
        ),
        max_in_flight=policy.max_in_flight,
        paused=policy.paused,
        min_replicas=policy.min_replicas,
    )


def _publish_result(one: Published) -> answers.PublishResult:
    if one.status != "failed":
        return answers.PublishResult(status=one.status, message_id=one.message_id)
    error = answers.PublishError(code=one.error_code, detail=one.error_detail)
    return answers.PublishResult(status="failed", message_id=one.message_id, error=error)


def popped_in_json(one: Leased) -> answers.PoppedMessage:
    return answers.in_json(popped_packed(one), one.message.body)


def popped_packed(one: Leased) -> answers.PoppedMessage:
    message = one.message
    return answers.PoppedMessage(
        # A message without an id has a temporary name in the engine, which is valid only until the AMQP channel closes.
        # This name is not an id for clients.
        message_id=message.message_id or UNSET,
        receipt_handle=one.receipt_handle,
        body=message.body,
        headers=message.headers,
        ordering_key=UNSET if message.ordering_key is None else message.ordering_key,
        queue=one.queue,
        delivery_count=one.delivery_count,
        published_at=message.published_at or UNSET,
        first_delivered_at=one.first_delivered_at,
        invisible_until=one.invisible_until,
    )
