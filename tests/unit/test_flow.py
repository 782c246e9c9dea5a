"""The prefetch and the memory of one queue's channel."""

from popgate.engine.context.engine_context import BufferBudget
from popgate.engine.queue.flow import Flow

SHARE_BYTES = 1_000_000


def test_what_arrives_while_a_pause_is_under_way_goes_back_before_it_fills_the_memory() -> None:
    """RabbitMQ answers a pause behind all the large messages that a prefetch for small ones has let in."""
    flow = Flow(BufferBudget(SHARE_BYTES))
    flow.open()
    flow.opened()
    flow.took(1, SHARE_BYTES + 1)
    assert not flow.throttle(), "the pause is asked for first"
    assert flow.next_resize() == 0
    flow.took(2, SHARE_BYTES // 4)
    assert not flow.throttle(), "what fits into half of a share waits for the pause"
    flow.took(3, SHARE_BYTES // 2)
    assert flow.throttle()
    flow.freed(SHARE_BYTES)
    assert flow.next_resize() is None
    assert flow.is_paused
    assert flow.throttle()
