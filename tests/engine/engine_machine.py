"""The engine over the real embedded broker and store, checked against a plain model of the promises to clients.

The model knows messages, leases and a clock, and nothing of how popgate works. A crash leaves what a SIGKILL leaves:
the data folder is copied between two commits and opened again. ``lease_group_machine`` adds lease groups.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.machine_model import ENDING, Expected, Group, Id, State
from popgate.domain.topics import Policy, RetryPolicy
from popgate.engine.lease.pop_request import Leased
from popgate.engine.publish.publishing import NewMessage
from popgate.engine.settle.orders import Verb
from popgate.ports.broker import PublishStatus
from popgate.runtime.clocks import ManualClock
from support.engines import World, body_of, crash, start_world, stop_world

T = TypeVar("T")

TOPIC = "t"
POLICIES = {
    "plain": Policy(invisibility_seconds=20, max_deliveries=None),
    "strict": Policy(
        invisibility_seconds=20,
        max_deliveries=3,
        retry=RetryPolicy(initial_seconds=7, multiplier=2, max_seconds=60),
    ),
}
DEDUP_SECONDS = 300.0
GROUPS = st.sampled_from(sorted(POLICIES))
COLORS = st.sampled_from(["red", "blue"])
DRAINED_BY: st.SearchStrategy[tuple[str | None, ...]] = st.sampled_from([(None,), ("red", "blue")])
SHORT_WAIT_SECONDS = 1.5
CLOSE = 0.001
"""Seconds from now within which an end could be judged either way; the clock never stops so close to one."""


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(
            tempfile.mkdtemp(prefix="popgate-machine-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self.clock = ManualClock()
        self.runner = asyncio.Runner()
        self.groups = {name: Group(policy) for name, policy in POLICIES.items()}
        self.published = 0
        self.ids: dict[str, Id] = {}
        self.lives = 0
        self.drained_by: tuple[str | None, ...] = (None,)
        """The filters of the pops that finally empty the queues."""
        self.world: World | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    @property
    def living(self) -> World:
        assert self.world is not None
        return self.world

    @property
    def folder(self) -> Path:
        return self.root / str(self.lives)

    @initialize(drained_by=DRAINED_BY)
    def start(self, drained_by: tuple[str | None, ...]) -> None:
        self.drained_by = drained_by

        async def begin() -> World:
            world = await start_world(self.folder, clock=self.clock, idle_return_seconds=45)
            await world.engine.changes.put_topic(TOPIC, queues=2, adopt=None)
            for name, policy in POLICIES.items():
                await world.engine.changes.put_group(TOPIC, name, policy)
            return world

        self.world = self.run(begin())

    # ------------------------------------------------------------ what clients do

    @rule(
        count=st.integers(1, 4),
        key=st.sampled_from([None, "a", "b"]),
        color=COLORS,
        delay=st.sampled_from([0.0, 0.0, 5.0]),
        ttl=st.sampled_from([None, None, 40.0]),
    )
    def publish(self, count: int, key: str | None, color: str, delay: float, ttl: float | None) -> None:
        if key is not None:
            delay = 0.0  # its place in line is decided when it becomes visible, which the model does not know
        bodies = [f"m{self.published + number}" for number in range(count)]
        self.published += count
        publish = self.living.publish(TOPIC, *bodies, ordering_key=key, headers={"color": color}, delay=delay, ttl=ttl)
        assert self.run(publish) == ["published"] * count
        self._is_published(*bodies, key=key, color=color)
        for one in [group.messages[body] for group in self.groups.values() for body in bodies]:
            one.expires = inf if ttl is None else self.now + delay + ttl
            if delay:
                one.state, one.ends, one.was_delayed = State.WAITING, self.now + delay, True

    def _is_published(self, *bodies: str, key: str | None, color: str) -> None:
        for group in self.groups.values():
            group.messages.update({body: Expected(body, key, color) for body in bodies})

    @rule(
        dedup_id=st.sampled_from("xyz"),
        outcome=st.sampled_from([PublishStatus.PUBLISHED, PublishStatus.PUBLISHED, PublishStatus.FAILED]),
        stored=st.booleans(),
    )
    def publish_once(self, dedup_id: str, outcome: PublishStatus, stored: bool) -> None:
        """Publish with a dedup_id. The broker may not report whether it has ``stored`` the message: then the next
        publish has to find out.
        """
        known = self.ids.get(dedup_id)
        if known is None or self.now - known.since >= DEDUP_SECONDS:
            known = self.ids[dedup_id] = Id(f"once-{self.published}", self.now)
            self.published += 1
        expected = "published" if outcome is PublishStatus.PUBLISHED else "failed"
        if known.confirmed:
            expected = "duplicate"
        elif outcome is PublishStatus.FAILED:
            self.living.broker.refuse(outcome, stored=stored)
        message_id = "of a repeat" if known.tried else known.body
        known.tried = True
        new = NewMessage(known.body.encode(), {"color": "red"}, message_id=message_id, dedup_id=dedup_id)
        (result,) = self.run(self.living.engine.publish(TOPIC, [new]))
        assert result.status == expected
        assert result.message_id == known.body, "the first one's"
        if not known.confirmed and (stored or outcome is PublishStatus.PUBLISHED) and not known.stored:
            known.stored = True
            self._is_published(known.body, key=None, color="red")
        known.confirmed = known.confirmed or outcome is PublishStatus.PUBLISHED

    @rule(
        name=GROUPS,
        count=st.integers(1, 5),
        invisibility=st.sampled_from([None, 3.0, 50.0]),
        attempt=st.sampled_from([None, None, "x", "y"]),
        color=st.none() | COLORS,
    )
    def pop(self, name: str, count: int, invisibility: float | None, attempt: str | None, color: str | None) -> None:
        group = self.groups[name]
        started = self.now
        popped = self.run(self.pop_patiently(name, count, invisibility, attempt, color))
        self.time_has_passed()
        if attempt is not None and self._repeated(group, attempt, popped):
            return
        assert min(1, len(group.on_offer(color))) <= len(popped) <= count, "what is visible is handed out"
        together: list[Expected] = []
        for one in popped:
            expected = group.messages[body_of(one.message)]
            assert color in (None, expected.color), "the filter held"
            group.check_turn(expected, started, together)
            together.append(expected)
            assert one.delivery_count == expected.count + 1
            self.is_leased(group, one)
            lasts = invisibility or group.policy.invisibility_seconds
            assert abs(expected.ends - (self.now + lasts)) < SHORT_WAIT_SECONDS + CLOSE
        if attempt is not None:
            group.attempts[attempt] = [one.receipt_handle for one in popped]

    def is_leased(self, group: Group, one: Leased) -> None:
        """Record a lease that a client got."""
        expected = group.messages[body_of(one.message)]
        expected.lease(
            one.receipt_handle, one.delivery_count, ends=one.invisible_until - (self.clock.wall() - self.now)
        )
        group.by_handle[one.receipt_handle] = expected

    async def pop_patiently(
        self, name: str, count: int, invisibility: float | None, attempt: str | None, color: str | None
    ) -> list[Leased]:
        only = None if color is None else {"color": [color]}
        pop = self.living.pop(TOPIC, name, count=count, invisibility=invisibility, attempt=attempt, only=only)
        popping = asyncio.ensure_future(pop)
        await self.patiently(popping)
        return popping.result()

    async def patiently(self, *work: asyncio.Future[Any]) -> None:
        """Return when one of ``work`` is done. Work that should not wait may still wait a moment for messages that
        the broker is known to have: then the clock advances.
        """
        while not (await asyncio.wait(work, timeout=0.5, return_when=asyncio.FIRST_COMPLETED))[0]:
            await self.turn_clock(SHORT_WAIT_SECONDS)

    async def turn_clock(self, seconds: float) -> None:
        """Advance the clock, even while requests are in progress: a retry's delay begins when the end of its lease
        is noticed.
        """
        await self.living.let_pass(seconds)
        self.time_has_passed()

    def _repeated(self, group: Group, attempt: str, popped: list[Leased]) -> bool:
        """Tell whether the leases of an earlier attempt still live: then it must have got the same messages and
        receipts.
        """
        live = [
            handle
            for handle in group.attempts.get(attempt, [])
            if group.by_handle[handle].handle == handle and group.by_handle[handle].state is State.LEASED
        ]
        if live:
            assert [one.receipt_handle for one in popped] == live
            assert [body_of(one.message) for one in popped] == [group.by_handle[handle].body for handle in live]
            assert [one.delivery_count for one in popped] == [group.by_handle[handle].count for handle in live]
        return bool(live)

    @rule(name=GROUPS, pick=st.integers(0, 11))
    def ack(self, name: str, pick: int) -> None:
        _, handle, one = self._lease(name, pick)
        if one is None:
            return
        status = self._settle(Verb.ACK, name, handle)
        if one.handle == handle and one.good and one.state in ENDING and status == "acked":
            one.state, one.gone = State.ACKED, True  # it was not yet leaving
        elif one.handle == handle and one.good and one.state in (State.LEASED, State.READY, State.WAITING):
            assert status == "acked"
            one.state, one.gone = State.ACKED, True
        elif one.handle == handle and one.state is State.ACKED:
            assert status == "already_acked"
        else:
            assert status == "expired"

    @rule(name=GROUPS, pick=st.integers(0, 11), seconds=st.sampled_from([1.0, 30.0]))
    def extend(self, name: str, pick: int, seconds: float) -> None:
        _, handle, one = self._lease(name, pick)
        if one is None:
            return
        status = self._settle(Verb.EXTEND, name, handle, seconds)
        current = one.handle == handle and one.good
        if current and (one.state in ENDING and status == "extended"):
            one.state, one.ends = State.LEASED, self.now + seconds
        elif current and one.state in (State.LEASED, State.READY, State.WAITING):
            assert status == "extended"
            one.state, one.ends = State.LEASED, self.now + seconds
        else:
            assert status == "expired"

    @rule(name=GROUPS, pick=st.integers(0, 11), seconds=st.sampled_from([None, 0.0, 11.0]))
    def release(self, name: str, pick: int, seconds: float | None) -> None:
        group, handle, one = self._lease(name, pick)
        if one is None:
            return
        if one.state is State.READY and seconds is None:
            seconds = 0.0  # after a crash its delivery count, and so its delay, is unknown
        status = self._settle(Verb.RELEASE, name, handle, seconds)
        current = one.handle == handle and one.good
        if current and (one.state in (State.LEASED, State.READY, State.WAITING) or status == "released"):
            assert status == "released"
            one.good, one.released = False, True
            delay = group.policy.retry.delay_seconds(one.count) if seconds is None else seconds
            if one.state is not State.EXHAUSTED:
                group.wait(one, self.now, delay)
        elif one.handle == handle and one.released and one.state in (State.READY, State.WAITING):
            assert status == "released"
        elif one.handle == handle and one.released and one.state in ENDING:
            assert status in ("released", "expired")
        else:
            assert status == "expired"

    @rule(name=GROUPS, pick=st.integers(0, 11))
    def reject(self, name: str, pick: int) -> None:
        _, handle, one = self._lease(name, pick)
        if one is None or one.state is State.GONE:
            return
        status = self._settle(Verb.REJECT, name, handle)
        if one.handle == handle and one.good and one.state in (State.LEASED, State.READY, State.WAITING):
            assert status in ("rejected", "unavailable")
            one.state, one.gone = State.DEAD, status == "rejected"
        elif one.handle == handle and one.state in (State.DEAD, State.EXHAUSTED):
            assert status in ("rejected", "expired", "unavailable")
        else:
            assert status == "expired"

    @rule(name=GROUPS, junk=st.text(max_size=40))
    def settle_with_a_forged_receipt(self, name: str, junk: str) -> None:
        foreign = next(iter(self.groups["plain" if name == "strict" else "strict"].by_handle), "")
        for verb in Verb:
            for handle in (junk, foreign, foreign[:-1]):
                assert self._settle(verb, name, handle, 5.0) == "invalid"

    def _lease(self, name: str, pick: int) -> tuple[Group, str, Expected | None]:
        group = self.groups[name]
        if not group.by_handle:
            return group, "", None
        recent = list(group.by_handle)[-12:]
        handle = recent[pick % len(recent)]
        return group, handle, group.by_handle[handle]

    def _settle(self, verb: Verb, name: str, handle: str, seconds: float | None = None) -> str:
        async def settle() -> str:
            (result,) = await self.living.settle_handles(verb, TOPIC, name, [handle], seconds=seconds)
            await self.living.settle_down(3)
            return result.status

        return self.run(settle())

    # ------------------------------------------------------------ what else happens

    @rule(seconds=st.sampled_from([0.5, 2.0, 8.0, 21.0, 61.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.run(self.turn_clock(self.clear_of_ends(seconds)))

    def clear_of_ends(self, seconds: float) -> float:
        """Return this time or slightly more, so that nothing ends at that moment."""
        ends = self.ends()
        while any(abs(self.now + seconds - end) < CLOSE for end in ends):
            seconds += 10 * CLOSE
        return seconds

    def ends(self) -> list[float]:
        """Return the times at which something ends."""
        ends = [one.ends for group in self.groups.values() for one in group.having(State.LEASED, State.WAITING)]
        return ends + [one.expires for group in self.groups.values() for one in group.messages.values()]

    def time_has_passed(self) -> None:
        for group in self.groups.values():
            for one in group.having(State.WAITING):
                if one.ends <= self.now:
                    group.visible(one, self.now)
            for one in group.having(State.LEASED):
                if one.ends <= self.now:
                    group.wait(one, self.now, group.policy.retry.delay_seconds(one.count))
            for one in group.having(State.READY):
                if one.expires <= self.now:
                    one.state = State.GONE

    @rule()
    def crash(self) -> None:
        self.run(self.crash_now())

    async def crash_now(self) -> None:
        old = self.folder
        self.lives += 1
        await crash(self.living, old, self.folder)
        assert not self.living.failures
        for one in [one for group in self.groups.values() for one in group.messages.values()]:
            one.came_back = one.came_back or one.gone
        self.world = await start_world(self.folder, clock=self.clock, idle_return_seconds=45)

    @invariant()
    def nothing_failed_in_the_background(self) -> None:
        if self.world is not None:
            assert not self.world.failures

    # ------------------------------------------------------------ in the end

    def teardown(self) -> None:
        try:
            if self.world is not None:
                self.drain_all()
                self.run(stop_world(self.world))
        finally:
            self.runner.close()
            shutil.rmtree(self.root, ignore_errors=True)

    def _drain(self, name: str, group: Group) -> None:
        """Pop and ack everything visible."""
        for _ in range(len(group.messages)):
            for color in self.drained_by:
                self.pop(name, 5, 50.0, None, color)
                while leased := group.having(State.LEASED):
                    for one in leased:
                        assert self._settle(Verb.ACK, name, one.handle) == "acked"
                        one.state, one.gone = State.ACKED, True
                    self.pop(name, 5, 50.0, None, color)
            if not group.on_offer(None):  # a message behind another color has to wait for that color's pop
                break

    def drain_all(self) -> None:
        """Check that every message neither acked nor dead-lettered comes again, and that the dead letters are
        complete, each once.
        """
        # The maximum number of remaining hand-outs, each with more than its longest delay; and one more for a message
        # behind one that waits, or that is about to become a dead letter.
        for _ in range(12):
            self.let_time_pass(seconds=100.0)
            for name, group in self.groups.items():
                self._drain(name, group)
            if not any(group.having(State.READY, State.WAITING) for group in self.groups.values()):
                break
        self.run(self.living.do_what_is_due())
        for name, group in self.groups.items():
            assert not group.having(State.READY, State.LEASED, State.WAITING)
            letters = self.run(self.living.dead_letters(TOPIC, name))
            assert sorted(map(body_of, letters)) == sorted(
                one.body for one in group.having(State.DEAD, State.EXHAUSTED)
            )
            for letter in letters:
                assert letter.headers["x-popgate-delivery-count"] == group.messages[body_of(letter)].count
                assert letter.headers["x-popgate-dead-cause"] in ("rejected", "max_deliveries")
                times = letter.headers["x-popgate-first-delivered-at"], letter.headers["x-popgate-dead-at"]
                assert all(isinstance(time, float) for time in times)
