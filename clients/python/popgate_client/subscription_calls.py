"""The calls of one consumer: those of an `AsyncClient`, with its topic, group and client id filled in.

Calls are not repeated here: the loops of the consumer's parts repeat them, and log and count it.
"""

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Collection, Sequence
from dataclasses import replace

from popgate_client import assignments
from popgate_client.assignments import Assignment
from popgate_client.async_client import AsyncClient
from popgate_client.errors import RequestInvalid
from popgate_client.exchange import Exchanges
from popgate_client.handling import GroupPolicy, RetryDelays
from popgate_client.lengths import POLICY_SECONDS
from popgate_client.message import Message, SettleEntry, SettleResult, Verb
from popgate_client.popping import PendingPop, Popped
from popgate_client.wire import HeaderFilter, JsonObject, subscription_path

NAME_FEATURE = "client_id"
"""Feature of a server that accepts this field in a pop."""
CAUSES_FEATURE, CAUSES_FIELDS = "causes", ("error", "client_id")
"""Feature of a server that accepts these fields in the entries of a release or a rejection."""
ACK_FEATURE, ACK_FIELD = "settle_on_pop", "ack"
"""Feature of a server that accepts this field in a pop."""
_HOST_LENGTH_MAX = 32


def new_client_id() -> str:
    """Return a unique id that shows where the consumer runs: machine, process ID, and a random part."""
    host = re.sub("[^A-Za-z0-9._-]", "-", socket.gethostname())[:_HOST_LENGTH_MAX]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


class SubscriptionCalls:
    """Makes the calls of one consumer. Each raises PopgateError."""

    def __init__(
        self,
        client: AsyncClient,
        topic: str,
        group: str,
        *,
        client_id: str,
        invisibility_seconds: float | None,
        filter: HeaderFilter | None,
        error_texts: bool = True,
    ) -> None:
        """`error_texts`: whether the texts of exceptions may be sent, and not only their types."""
        self._client = client
        self._exchanges = Exchanges(retry_seconds_max=0.0)
        self._topic = topic
        self._group = group
        self._client_id = client_id
        self._invisibility_seconds = invisibility_seconds
        self._filter = filter
        self._error_texts = error_texts
        self._tells_its_name = False
        self._tells_causes = False
        self.acks_with_pops = False
        """Whether the server accepts acks in a pop."""
        self._policy: tuple[float, GroupPolicy] | None = None

    async def features(self) -> Collection[str]:
        """Return the server's features."""
        names = await self._client.perform(self._exchanges.read_as("/v1", _features))
        self._tells_its_name = NAME_FEATURE in names
        self._tells_causes = CAUSES_FEATURE in names
        self.acks_with_pops = ACK_FEATURE in names
        return names

    async def pop(self, pending: PendingPop, wait_seconds: float) -> Popped:
        """Pop with the client id and the acks if the server accepts them. Another, older server may answer at the same
        address, so a rejected field is left out from then on."""
        while True:
            try:
                return await self._pop(pending, wait_seconds)
            except RequestInvalid as error:
                if self._tells_its_name and error.field == NAME_FEATURE:
                    self._tells_its_name = False
                elif self.acks_with_pops and error.field == ACK_FIELD:
                    self.acks_with_pops = False
                else:
                    raise

    async def _pop(self, pending: PendingPop, wait_seconds: float) -> Popped:
        acks = pending.acks if self.acks_with_pops else ()
        exchange = self._exchanges.ack_and_pop(
            self._topic,
            self._group,
            acks,
            make=Message,
            max_messages=pending.max_messages,
            wait_seconds=wait_seconds,
            invisibility_seconds=self._invisibility_seconds,
            attempt_id=pending.attempt_id,
            client_id=self._client_id if self._tells_its_name else None,
            filter=self._filter,
        )
        messages, acked = await self._client.perform(exchange)
        return Popped(messages, acked if self.acks_with_pops else None)

    async def settle(self, verb: Verb, entries: Sequence[SettleEntry]) -> list[SettleResult]:
        """Settle, and say why messages are given back if the server accepts it. Another, older server may answer at the
        same address, so rejected fields are left out from then on."""
        try:
            return await self._settle(verb, entries)
        except RequestInvalid as error:
            if not self._tells_causes or (error.field or "").rpartition(".")[2] not in CAUSES_FIELDS:
                raise
            self._tells_causes = False
            return await self._settle(verb, entries)

    async def _settle(self, verb: Verb, entries: Sequence[SettleEntry]) -> list[SettleResult]:
        if verb in (Verb.RELEASE, Verb.REJECT):
            entries = [self._with_cause(entry) for entry in entries]
        return await self._client.perform(self._exchanges.settle(self._topic, self._group, verb, entries))

    def _with_cause(self, entry: SettleEntry) -> SettleEntry:
        if not self._tells_causes:
            return replace(entry, error_type=None, error_text=None, client_id=None)
        text = entry.error_text if self._error_texts else None
        return replace(entry, error_text=text, client_id=self._client_id)

    async def lease_seconds(self) -> float:
        """Return the length of a lease if a pop does not specify it."""
        return await self._client.perform(self._exchanges.invisibility_seconds(self._topic, self._group))

    async def policy(self) -> GroupPolicy:
        """Return the part of the group's policy that concerns failures, at most POLICY_SECONDS old."""
        now = asyncio.get_running_loop().time()
        if self._policy is None or now > self._policy[0] + POLICY_SECONDS:
            path = subscription_path(self._topic, self._group)
            self._policy = now, await self._client.perform(self._exchanges.read_as(path, _policy))
        return self._policy[1]

    # -- pull mode ------------------------------------------------------------------------------------------------

    async def assignment(self, supports: Sequence[str], generation: int | None) -> Assignment:
        exchange = assignments.assign(self._exchanges, self._topic, self._group, self._client_id, supports, generation)
        return await self._client.perform(exchange)

    async def pull(
        self, queue: int, generation: int, max_messages: int, wait_seconds: float, after: str | None
    ) -> list[Message]:
        exchange = assignments.pull(
            self._exchanges,
            self._topic,
            self._group,
            queue,
            self._client_id,
            generation,
            max_messages=max_messages,
            wait_seconds=wait_seconds,
            after=after,
        )
        return await self._client.perform(exchange)

    async def commit(self, queue: int, generation: int, receipt_handle: str) -> int:
        exchange = assignments.commit(
            self._exchanges, self._topic, self._group, queue, self._client_id, generation, receipt_handle
        )
        return await self._client.perform(exchange)

    async def reject(self, entry: SettleEntry) -> str:
        """Reject one message; return the status of the result."""
        return (await self.settle(Verb.REJECT, [entry]))[0].status

    async def leave(self) -> None:
        await self._client.perform(assignments.leave(self._exchanges, self._topic, self._group, self._client_id))


def _features(body: JsonObject) -> list[str]:
    return [str(name) for name in body["features"]]


def _policy(body: JsonObject) -> GroupPolicy:
    policy = body["policy"]
    retry = policy.get("retry", {})
    delays = RetryDelays(
        initial_seconds=float(retry.get("initial_seconds", 0.0)),
        multiplier=float(retry.get("multiplier", 1.0)),
        seconds_max=float(retry.get("max_seconds", 0.0)),
    )
    return GroupPolicy(max_deliveries=policy.get("max_deliveries"), retry=delays)
