"""Publishers and consumers over raw HTTP that record everything in an `Audit`, and continue through any fault.

This module owns the load: how much is published, which client pops what, and how each lease ends. The test disturbs the
servers. Every choice comes from the seed; the timing depends on the machine.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Self

from support.audit import DONE, Lease, Traits, Verb, now
from support.audit_client import POLL_SECONDS, AuditedClient, message_body, until
from support.audit_told import tell

EMPTY_SECONDS = 5.0
KEYS = 6
"""Number of ordering keys of one publisher."""
COLORS = ("red", "green", "blue")
TTLS = (2, 5, 3_600)
"""Times to live in seconds: some messages expire in their queue, some while they are leased, some never in a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the load behaves. Shares are of all pops; the remaining pops are acked.

    `open_max`: publishers pause while that many messages are unsettled, and for up to `rest_seconds_max` after each
    publish. `held_max`: leases kept for the test. A lease that is to be settled asks for `lease_seconds`, or for a
    random time from `lease_seconds_min` on; a held one for `held_seconds`; one that is to run out for the minimum. Pops
    wait for `wait_seconds`, or for a random time up to `wait_seconds_max`. The messages of a mixed pop are acked,
    released or, `reject_share` of them, rejected. Of all publishes `keyed_share` have ordering keys, `delayed_share`
    delays, `once_share` dedup_ids, `ttl_share` a time to live; `again_share` of those with dedup_ids are published once
    more. `filtered_share` of the pops have a filter.
    """

    publishers: int = 3
    consumers: int = 6
    batch_max: int = 48
    rest_seconds_max: float = 0.0
    body_bytes_max: int = 2_000
    open_max: int = 1_500
    lease_seconds: float = 6.0
    lease_seconds_min: float | None = None
    held_seconds: float = 6.0
    held_max: int = 48
    wait_seconds: float = 0.5
    wait_seconds_max: float | None = None
    hold_share: float = 0.1
    mixed_share: float = 0.15
    expire_share: float = 0.06
    late_share: float = 0.05
    extend_share: float = 0.05
    attempt_share: float = 0.08
    reject_share: float = 0.0
    keyed_share: float = 0.0
    delayed_share: float = 0.0
    once_share: float = 0.0
    again_share: float = 0.0
    filtered_share: float = 0.0
    ttl_share: float = 0.0

    @classmethod
    def with_everything(cls, **habits: Any) -> Self:
        """Return habits that use every feature a message may have."""
        defaults: dict[str, Any] = {"keyed_share": 0.4, "delayed_share": 0.2, "once_share": 0.3, "again_share": 0.2}
        return cls(**defaults, filtered_share=0.2, ttl_share=0.2, **habits)


class Load:
    """Publishers and consumers that run inside `async with`. An unexpected error in one of them ends the test.

    `name` must be unique among the loads of one audit.
    """

    def __init__(self, client: AuditedClient, seed: str, habits: Habits | None = None, *, name: str = "") -> None:
        self.client = client
        self._name = name
        self.audit = client.audit
        self.habits = habits or Habits()
        self.held: list[Lease] = []
        """Leases that the load leaves alone until the test takes them."""
        self._seed = seed
        self._attempts = count(1)
        self._publishing = True
        self._draining = False
        self._stopping = False
        self._is_resting = False
        self._at_work = 0
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._publishers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        tasks = self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        for number in range(self.habits.publishers):
            publishing = self._publish_on(f"{self._name}p{number}")
            self._publishers.append(tasks.create_task(publishing, name=f"publisher {number}"))
        for number in range(self.habits.consumers):
            tasks.create_task(self._consume_on(f"{self._name}c{number}"), name=f"consumer {number}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publishing = False
        self._stopping = True
        await self._stack.__aexit__(kind, error, trace)

    def take_held(self) -> list[Lease]:
        """Return the held leases, which the caller owns from now on; others will be held in their place."""
        held, self.held = self.held, []
        return held

    @asynccontextmanager
    async def at_rest(self, *, timeout_seconds: float) -> AsyncGenerator[None]:
        """Keep all clients idle inside the block. Raises: TimeoutError if a client does not finish its request."""
        self._is_resting = True
        try:
            await until(lambda: not self._at_work, timeout_seconds=timeout_seconds, what="the load to rest")
            yield
        finally:
            self._is_resting = False

    def stop_publishing(self) -> None:
        self._publishing = False

    async def grow(self, more: int, *, timeout_seconds: float = 60.0) -> None:
        """Return when that many more messages were published and as many leases were granted."""
        audit = self.audit
        published, leased = audit.published_count + more, audit.lease_count + more

        def grown() -> bool:
            return audit.published_count >= published and audit.lease_count >= leased

        await until(grown, timeout_seconds=timeout_seconds, what=lambda: f"{more} more messages: {self._state()}")

    async def drain(
        self,
        *,
        timeout_seconds: float = 90.0,
        missing_seconds: float = EMPTY_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Stop publishing, ack everything that comes, and return when popgate says that nothing is left.

        If a message is missing, popgate must say for `missing_seconds` that nothing is left; then the message is lost,
        and the judge will report it. A dead letter is not missing, and neither is one that was redriven elsewhere.
        """
        self._publishing = False
        self._draining = True
        if held := self.take_held():
            await self.client.settle_surely(Verb.ACK, held)
        deadline = now() + timeout_seconds
        if self._publishers:  # an unanswered publish may still arrive
            await asyncio.wait(self._publishers, timeout=timeout_seconds)
        empty_since = float("inf")
        while True:
            state = await self.client.state()
            if state["ready"] or state["in_flight"] or state["delayed"]:
                empty_since = float("inf")
            elif not await self._missing() or now() - empty_since > missing_seconds:
                return
            else:
                empty_since = min(empty_since, now())
            if now() > deadline:
                outstanding = self.audit.outstanding()
                told = "\n".join(tell(self.audit, message_id) for message_id in outstanding[:3])
                raise TimeoutError(f"waited {timeout_seconds:g} s to be empty: {state}\n{self._state()}\n{told}")
            await asyncio.sleep(poll_seconds)

    async def _missing(self) -> set[str]:
        missing = {*self.audit.outstanding()} - self.audit.redriven.keys()
        return missing - {letter.message_id for letter in await self.client.dead_letters()} if missing else missing

    # ------------------------------------------------------------ publishers

    async def _publish_on(self, name: str) -> None:
        chance = random.Random(f"{self._seed} {name}")
        habits = self.habits
        number = 0
        while self._publishing:
            if self._is_resting or self.audit.open_count >= habits.open_max:
                await asyncio.sleep(POLL_SECONDS)
                continue
            messages: list[tuple[str, str]] = []
            traits: list[Traits] = []
            once = chance.random() < habits.once_share
            for _ in range(chance.randint(1, habits.batch_max)):
                message_id = f"{name}-{number}"
                number += 1
                messages.append((message_id, message_body(message_id, chance.randint(0, habits.body_bytes_max))))
                traits.append(self._traits(name, message_id, chance, once=once))
            again = once and chance.random() < habits.again_share
            with self._work():
                await self.client.publish(messages, traits, again=again)
            if habits.rest_seconds_max:
                await asyncio.sleep(chance.uniform(0.0, habits.rest_seconds_max))

    def _traits(self, name: str, message_id: str, chance: random.Random, *, once: bool) -> Traits:
        habits = self.habits
        roll = chance.random()
        return Traits(
            ordering_key=f"{name}-{chance.randint(0, KEYS - 1)}" if roll < habits.keyed_share else None,
            delay_seconds=chance.randint(1, 3) if roll > 1.0 - habits.delayed_share else 0,
            dedup_id=message_id if once else None,
            color=chance.choice(COLORS) if habits.filtered_share else None,
            ttl_seconds=chance.choice(TTLS) if chance.random() < habits.ttl_share else float("inf"),
        )

    # ------------------------------------------------------------ consumers

    async def _consume_on(self, name: str) -> None:
        chance = random.Random(f"{self._seed} {name}")
        while not self._stopping:
            if self._is_resting:
                await asyncio.sleep(POLL_SECONDS)
                continue
            with self._work():
                await self._consume(name, chance)

    @contextmanager
    def _work(self) -> Generator[None]:
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    async def _consume(self, name: str, chance: random.Random) -> None:
        habits, client = self.habits, self.client
        action = self._action(chance)
        hold = action == "hold" and len(self.held) < habits.held_max
        longest, shortest = habits.lease_seconds, habits.lease_seconds_min
        lease_seconds = longest if shortest is None else round(chance.uniform(shortest, longest), 1)
        seconds = 1.0 if action in ("expire", "late") else habits.held_seconds if hold else lease_seconds
        wait_seconds = self._wait_seconds(chance)
        most = chance.choice((1, 4, 8)) if hold or action != "ack" else chance.randint(1, habits.batch_max)
        leases: list[Lease] | None
        if action == "attempt":
            leases = await self._attempt(name, most, seconds, wait_seconds)
        else:
            color = chance.choice(COLORS) if chance.random() < habits.filtered_share and not self._draining else None
            leases = await client.pop(name, max_messages=most, wait_seconds=wait_seconds, seconds=seconds, color=color)
        if not leases:
            return
        if hold and not self._draining:
            self.held += leases
        elif action == "expire":
            pass
        elif action == "late":
            await asyncio.sleep(chance.uniform(0.8, 1.4))
            await client.settle_surely(Verb.ACK, leases)
        elif action == "extend":
            await client.settle_surely(Verb.EXTEND, leases, habits.lease_seconds)
            await client.settle_surely(Verb.ACK, leases)
        elif action == "mixed":
            await self._settle_apart(leases, chance)
        else:
            await client.settle_surely(Verb.ACK, leases)

    def _wait_seconds(self, chance: random.Random) -> float:
        most = self.habits.wait_seconds_max
        if most is None or self._draining:
            return self.habits.wait_seconds
        return chance.choice((0.0, self.habits.wait_seconds, round(chance.uniform(0.0, most), 1)))

    async def _attempt(self, name: str, most: int, seconds: float, wait_seconds: float) -> list[Lease]:
        """Pop under an attempt id until there is an answer, and once more, as a client does that lost the first
        answer.
        """
        attempt_id = f"{name} {next(self._attempts)}"
        given: list[Lease] = []
        answers = 0
        while answers < 2 and not self._stopping:
            leases = await self.client.pop(
                name, max_messages=most, wait_seconds=wait_seconds, seconds=seconds, attempt_id=attempt_id
            )
            if leases is not None:
                answers += 1
                given += [lease for lease in leases if lease not in given]
        return given

    def _action(self, chance: random.Random) -> str:
        habits = self.habits
        if self._draining:
            return "ack"
        shares = {
            "hold": habits.hold_share,
            "mixed": habits.mixed_share,
            "expire": habits.expire_share,
            "late": habits.late_share,
            "extend": habits.extend_share,
            "attempt": habits.attempt_share,
        }
        return chance.choices([*shares, "ack"], [*shares.values(), 1.0 - sum(shares.values())])[0]

    async def _settle_apart(self, leases: Sequence[Lease], chance: random.Random) -> None:
        """Settle each message in a different way."""
        fates: dict[tuple[Verb, float], list[Lease]] = {}
        for lease in leases:
            roll = chance.random()
            if roll < self.habits.reject_share:
                fate = (Verb.REJECT, 0.0)
            elif roll < 0.5:
                fate = (Verb.RELEASE, chance.choice((0.0, 0.0, 0.3, 1.0)))
            else:
                fate = (Verb.ACK, 0.0)
            fates.setdefault(fate, []).append(lease)
        for (verb, seconds), chosen in fates.items():
            statuses = await self.client.settle_surely(verb, chosen, seconds)
            expected = {DONE[verb], "already_acked", "expired", "unavailable"}
            assert set(statuses) <= expected, statuses

    # ------------------------------------------------------------ figures

    def _state(self) -> str:
        outstanding = self.audit.outstanding()
        return f"{self.audit.figures()}, outstanding {len(outstanding)}: {outstanding[:5]}, {self.client.refusals}"
