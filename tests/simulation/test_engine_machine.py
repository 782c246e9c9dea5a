"""The engine over the real embedded broker and store, held against a plain model (``engine_machine``)."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from popgate.engine import lease_groups
from simulation.engine_machine import EngineMachine
from simulation.lease_group_machine import LeaseGroupMachine


@pytest.mark.parametrize("machine", [EngineMachine, LeaseGroupMachine])
def test_the_engine_keeps_its_promises_whatever_clients_the_clock_and_crashes_do(
    machine: type[EngineMachine], monkeypatch: pytest.MonkeyPatch, *, full_run: bool
) -> None:
    monkeypatch.setattr(lease_groups, "POP_MAX", 2)  # so that a lease group is formed in several steps
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    examples = 3_000 if full_run else 100
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )
