"""The schedule of chaos follows from the seed, and stays within the faults that popgate promises to survive."""

from itertools import islice

from chaos.nemesis import SECONDS, Fault, schedule

STEPS = 2_000
OF_RABBITMQ = {Fault.NODE_KILL, Fault.NODE_PAUSE, Fault.AMQP_CUT, Fault.POLICY, Fault.POLICY_DROPS}


def test_a_seed_always_gives_the_same_steps_and_another_seed_others() -> None:
    assert [*islice(schedule(7), STEPS)] == [*islice(schedule(7), STEPS)]
    assert [*islice(schedule(7), STEPS)] != [*islice(schedule(8), STEPS)]


def test_every_fault_happens_for_as_long_as_it_may() -> None:
    steps = [*islice(schedule(7), STEPS)]
    assert {step.fault for step in steps} == {*Fault}
    for step in steps:
        shortest, longest = SECONDS.get(step.fault, (0.0, 0.0))
        assert shortest <= step.seconds <= longest


def test_one_thing_at_a_time_is_done_to_rabbitmq() -> None:
    steps = [*islice(schedule(7), STEPS)]
    nodes = [step for step in steps if step.fault in OF_RABBITMQ]
    assert {step.part for step in nodes} == {"RabbitMQ"}
    assert {step.part for step in steps} == {"RabbitMQ", "Redis", "proxy 0", "proxy 1", "proxy 2"}
