"""The prefetch window: bounded by bytes, grown by starvation."""

from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.message import MESSAGE_BYTES_MAX
from popgate.engine.queue.prefetch_window import PREFETCH_MAX, PREFETCH_START_MAX, PrefetchWindow

MIB = 1024 * 1024


def test_a_queue_of_unknown_sizes_starts_within_its_share_even_if_every_message_is_the_largest() -> None:
    assert PrefetchWindow().restart(64 * MIB) * MESSAGE_BYTES_MAX <= 64 * MIB


def test_a_queue_of_small_messages_grows_when_pops_starve() -> None:
    window = PrefetchWindow()
    window.observe(1_000)
    before = window.restart(64 * MIB)
    assert window.grown(64 * MIB) > before


def test_a_large_message_counts_at_once_and_a_small_one_slowly() -> None:
    window = PrefetchWindow()
    window.observe(100)
    window.observe(1_000_000)
    assert window.mean_bytes == 1_000_000
    window.observe(100)
    assert 900_000 < (window.mean_bytes or 0) < 1_000_000


def test_a_restarted_window_is_not_wider_than_a_fresh_start_needs() -> None:
    window = PrefetchWindow()
    window.observe(100)
    while window.grown(64 * MIB) < PREFETCH_MAX:
        pass
    assert window.restart(64 * MIB) == PREFETCH_START_MAX


@given(st.lists(st.integers(1, MESSAGE_BYTES_MAX), min_size=1, max_size=50), st.integers(1 * MIB, 1024 * MIB))
def test_growth_stays_within_the_budget_for_messages_of_the_last_size(sizes: list[int], share: int) -> None:
    window = PrefetchWindow()
    window.restart(share)
    for _ in range(200):
        window.observe(max(sizes))
        window.grown(share)
    assert window.prefetch <= max(window.restart(share), share // max(sizes), 1) or window.prefetch == 1
    assert window.prefetch <= PREFETCH_MAX


def test_a_large_message_counts_at_once() -> None:
    window = PrefetchWindow()
    for _ in range(100):
        window.observe(100)
    window.observe(16 * MIB)
    assert window.shrunk(64 * MIB) <= 4
