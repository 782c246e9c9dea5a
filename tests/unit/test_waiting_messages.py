"""The oldest waiting message and the oldest lease of a queue are found without a visit of all messages."""

import gc

from popgate.engine.queue.buffered import BufferedMessage
from unit.queue_model import ORDER_OF_ARRIVAL, Copy, World

LEASE_SECONDS = 30.0


def filled(count: int) -> World:
    """Return a queue with messages in memory, each of which was published a second after the one before."""
    world = World(now=100.0)
    world.copies = [Copy(number, None, b"") for number in range(count)]
    world.open()
    while world.undelivered():
        world.deliver(count, 0)
        world.starve()
    return world


def lease_first(world: World) -> None:
    world.lease(world.offered()[0], LEASE_SECONDS)


def oldest(world: World) -> float | None:
    """Return how many seconds after the first message of the world the oldest waiting one was published."""
    at = world.state.waiting.oldest_at()
    return None if at is None else at - ORDER_OF_ARRIVAL


def test_a_leased_message_does_not_wait_and_waits_again_since_its_publish_when_the_lease_ends() -> None:
    world = filled(2)
    seen = [oldest(world)]
    for _ in range(2):
        lease_first(world)
        seen.append(oldest(world))
    world.pass_time(LEASE_SECONDS)
    seen.append(oldest(world))
    assert seen == [0.0, 1.0, None, 0.0]


def test_a_message_that_is_settled_no_longer_waits_and_a_new_one_does() -> None:
    world = filled(1)
    lease_first(world)
    seen = [oldest(world)]
    world.settle(world.copies[0])
    world.copies.append(Copy(1, None, b""))
    world.deliver(1, 0)
    assert [*seen, oldest(world)] == [None, 1.0]


def test_the_age_of_the_oldest_lease_is_that_of_the_first_one_that_has_not_ended() -> None:
    world = filled(3)
    ages: list[float | None] = [world.state.oldest_lease.leased_at()]
    for _ in range(3):
        lease_first(world)
        world.now += 1
        ages.append(world.state.oldest_lease.leased_at())
    for copy in world.copies:
        world.settle(copy)
        ages.append(world.state.oldest_lease.leased_at())
    assert ages == [None, 100.0, 100.0, 100.0, 101.0, 102.0, None]


def test_what_was_dropped_is_forgotten() -> None:
    world, before = filled(1), in_memory()
    for number in range(1, 2_000):
        lease_first(world)
        world.settle(world.copies[number - 1])
        world.copies.append(Copy(number, None, b""))
        world.deliver(1, 0)
        assert oldest(world) == number
    assert in_memory() - before < 300


def in_memory() -> int:
    gc.collect()
    return sum(isinstance(one, BufferedMessage) for one in gc.get_objects())
