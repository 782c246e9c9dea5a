"""Switches of the consume mode in addition to everything that ``engine_machine`` does, checked against the same plain
model.

While a group is not in pop mode, no client gets anything new; a drain ends with the last lease or after its time, and
only then cuts off the remaining leases. After any switches, every unsettled message comes again in the end.
"""

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.engine_machine import COLORS, GROUPS, TOPIC, EngineMachine
from engine.machine_model import Expected, Group, State
from popgate.domain.errors import WrongMode
from popgate.domain.topics import ConsumeMode, GroupSpec
from popgate.engine.settle.orders import Verb
from popgate.engine.subscription.draining import LOOK_SECONDS

LOOKS = 20


class ModeMachine(EngineMachine):
    def __init__(self) -> None:
        super().__init__()
        self.drains_until: dict[str, float] = {}
        """The ends of the running drains."""
        self.generations: dict[str, list[int]] = {}

    def spec(self, name: str) -> GroupSpec:
        return self.living.served(TOPIC, name).spec

    @rule(name=GROUPS, mode=st.sampled_from([ConsumeMode.POP, ConsumeMode.PULL]), seconds=st.sampled_from([None, 0, 9]))
    def switch(self, name: str, mode: ConsumeMode, seconds: float | None) -> None:
        before = self.spec(name)
        self.run(self.living.engine.changes.switch(TOPIC, name, mode, seconds))
        after = self.spec(name)
        if after.drain is None:
            assert after.mode is mode
            self.drains_until.pop(name, None)
        elif before.drain is None or before.drain.to is not mode or seconds is not None:
            self.drains_until[name] = self.now + (60.0 if seconds is None else seconds)
        self.follow()

    def follow(self) -> None:
        """Check that a mode ends soon after its time is over, and not otherwise."""
        for name, group in self.groups.items():
            live = group.having(State.LEASED)
            for _ in range(LOOKS):
                if self.spec(name).drain is None or (live and self.now < self.drains_until[name]):
                    break
                self.run(self.turn_clock(self.clear_of_ends(2 * LOOK_SECONDS)))
                live = group.having(State.LEASED)
            spec = self.spec(name)
            self.generations.setdefault(name, []).append(spec.mode_generation)
            if spec.drain is not None:
                assert live, "it ends with the last lease"
                assert self.now < self.drains_until[name], "it ends after its time"
            elif (until := self.drains_until.pop(name, None)) is not None:
                assert not live or self.now >= until, "it ended before its time, with leases that live"
                if spec.mode is ConsumeMode.PULL:
                    self.cut_off(group, live)

    def cut_off(self, group: Group, live: list[Expected]) -> None:
        for one in live:
            one.good, one.released = False, True
            group.visible(one, self.now)

    # ------------------------------------------------------------ what is different in another mode

    @rule(
        name=GROUPS,
        count=st.integers(1, 5),
        invisibility=st.sampled_from([None, 3.0, 50.0]),
        attempt=st.sampled_from([None, None, "x", "y"]),
        color=st.none() | COLORS,
    )
    def pop(self, name: str, count: int, invisibility: float | None, attempt: str | None, color: str | None) -> None:
        self.follow()
        group = self.groups[name]
        is_live = any(
            group.by_handle[handle].handle == handle and group.by_handle[handle].state is State.LEASED
            for handle in group.attempts.get(attempt or "", [])
        )
        if self.spec(name).mode is ConsumeMode.POP or is_live:
            super().pop(name, count, invisibility, attempt, color)
        else:
            with pytest.raises(WrongMode):
                self.run(self.pop_patiently(name, count, invisibility, attempt, color))

    def _settle(self, verb: Verb, name: str, handle: str, seconds: float | None = None) -> str:
        self.follow()
        return super()._settle(verb, name, handle, seconds)

    @rule(name=GROUPS, pick=st.integers(0, 11), seconds=st.sampled_from([1.0, 30.0]))
    def extend(self, name: str, pick: int, seconds: float) -> None:
        super().extend(name, pick, seconds)
        group = self.groups[name]
        if self.spec(name).mode is ConsumeMode.PULL:  # one that ran out was extended: it is no longer valid
            self.run(self.living.settle_down())
            self.cut_off(group, group.having(State.LEASED))

    def drain_all(self) -> None:
        for name in self.groups:
            self.switch(name, ConsumeMode.POP, None)
        super().drain_all()
        for generations in self.generations.values():
            assert all(before <= after for before, after in pairwise(generations))
