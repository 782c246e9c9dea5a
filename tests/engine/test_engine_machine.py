"""The engine over the real embedded broker and store, checked against a plain model (``engine_machine``)."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.engine_machine import EngineMachine
from engine.lease_group_machine import LeaseGroupMachine
from engine.machine_model import State
from engine.mode_machine import ModeMachine
from popgate.engine.lease_groups import lease_groups


@pytest.mark.parametrize("machine", [EngineMachine, LeaseGroupMachine, ModeMachine])
def test_the_engine_keeps_its_promises_whatever_clients_the_clock_and_crashes_do(
    machine: type[EngineMachine], monkeypatch: pytest.MonkeyPatch, *, full_run: bool
) -> None:
    monkeypatch.setattr(lease_groups, "POP_MAX", 2)  # so that a lease group is formed in several steps
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    examples = 3_000 if full_run else 50
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )


def test_the_model_sees_a_lease_end_when_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even within a request: otherwise it would consider a message hidden that has waited long enough for its retry."""
    monkeypatch.setattr(lease_groups, "POP_MAX", 2)
    machine = LeaseGroupMachine()
    try:
        machine.start(drained_by=(None,), backlog=[(3, None, "red")])
        machine.pop(name="strict", count=1, invisibility=3.0, attempt=None, color=None)
        machine.put("plain", "s", 1, count=3, slices=1, is_brief=False, pauses=[4.1, 4.1], has_rival=False)
        machine.let_time_pass(seconds=4.0)  # 7.1 seconds since the lease ended, 4.0 since the group was formed
        machine.pop(name="strict", count=3, invisibility=None, attempt=None, color=None)
        assert not machine.groups["strict"].having(State.READY, State.WAITING)
    finally:
        machine.teardown()
