"""The prefetch and the memory of one queue's channel."""

from popgate.engine.context.engine_context import BufferBudget
from popgate.engine.queue.flow import Flow
from popgate.engine.queue.lacking_queues import LackingQueues

SHARE_BYTES = 1_000_000


def test_what_arrives_while_a_pause_is_under_way_goes_back_before_it_fills_the_memory() -> None:
    """RabbitMQ answers a pause behind all the large messages that a prefetch for small ones has let in."""
    budget = BufferBudget(SHARE_BYTES)
    flow = Flow(budget, 0, LackingQueues(budget))
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


def _opened(lacking: LackingQueues, budget: BufferBudget) -> tuple[Flow, int]:
    flow = Flow(budget, 7, lacking)
    prefetch = flow.open()
    flow.opened()
    return flow, prefetch


def _widened(flow: Flow) -> None:
    flow.widen()
    while flow.next_resize() is not None:
        pass


def test_a_queue_counts_as_constrained_until_its_prefetch_suffices() -> None:
    budget = BufferBudget(SHARE_BYTES)
    lacking = LackingQueues(budget)
    flow, prefetch = _opened(lacking, budget)
    for tag in range(1, prefetch + 1):
        flow.took(tag, 1)
    flow.note()
    assert lacking.constrained == {7}
    _widened(flow)
    assert lacking.constrained == {7}, "it may have been used up again"
    _widened(flow)
    assert not lacking.constrained
    flow.pause()
    assert lacking.constrained == {7}
    flow.closed()
    assert not lacking.constrained


def test_a_queue_counts_as_constrained_when_other_queues_cut_its_memory_share() -> None:
    budget = BufferBudget(SHARE_BYTES)
    lacking = LackingQueues(budget)
    flow, _ = _opened(lacking, budget)
    flow.took(1, SHARE_BYTES // 3)
    _widened(flow)
    _widened(flow)
    assert lacking.share_was_cut(), "the queue itself was opened"
    assert not lacking.share_was_cut()
    flow.note()
    assert not lacking.constrained
    assert budget.keep(SHARE_BYTES // 2)  # a body of another queue
    assert lacking.share_was_cut()
    flow.note()
    assert lacking.constrained == {7}
    budget.let_go(SHARE_BYTES // 2)
    _widened(flow)
    assert not lacking.constrained
    budget.opened(object())
    assert lacking.share_was_cut()
    flow.note()
    assert lacking.constrained == {7}


def test_a_queue_counts_as_constrained_when_its_prefetch_is_used_up_while_it_is_opened() -> None:
    budget = BufferBudget(SHARE_BYTES)
    lacking = LackingQueues(budget)
    flow = Flow(budget, 7, lacking)
    for tag in range(1, flow.open() + 1):
        flow.took(tag, 1)
    flow.note()
    flow.opened()
    assert lacking.constrained == {7}


def test_a_queue_counts_as_constrained_when_a_kept_body_may_be_dropped_again() -> None:
    budget = BufferBudget(SHARE_BYTES)
    lacking = LackingQueues(budget)
    flow, _ = _opened(lacking, budget)
    flow.took(1, SHARE_BYTES // 2 + 1)
    assert flow.keep(SHARE_BYTES // 2)
    _widened(flow)
    _widened(flow)
    assert not lacking.constrained
    flow.unkeep(SHARE_BYTES // 2)
    assert lacking.constrained == {7}
