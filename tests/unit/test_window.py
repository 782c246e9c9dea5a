"""The prefetch window: bounded by bytes, grown by starvation."""

from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.message import MESSAGE_BYTES_MAX
from popgate.engine.window import OVERHEAD_BYTES, PREFETCH_MAX, PREFETCH_START_MAX, Window

MIB = 1024 * 1024


def test_a_queue_of_unknown_sizes_starts_within_its_share_even_if_every_message_is_the_largest() -> None:
    window = Window(share_bytes=64 * MIB)
    assert window.prefetch * MESSAGE_BYTES_MAX <= 64 * MIB


def test_a_queue_of_small_messages_grows_when_pops_starve_and_not_before() -> None:
    window = Window(share_bytes=64 * MIB)
    window.observe(1_000)
    assert window.grown(credit_used=window.prefetch - 1) is None
    before = window.prefetch
    after = window.grown(credit_used=before)
    assert after is not None
    assert after > before


def test_a_restarted_window_is_not_wider_than_a_fresh_start_needs() -> None:
    window = Window(share_bytes=64 * MIB)
    window.observe(100)
    while (window.grown(window.prefetch) or PREFETCH_MAX) < PREFETCH_MAX:
        pass
    assert window.restart() == PREFETCH_START_MAX


@given(st.lists(st.integers(0, MESSAGE_BYTES_MAX), min_size=1, max_size=50), st.integers(1 * MIB, 1024 * MIB))
def test_growth_stays_within_the_budget_for_messages_of_the_last_size(sizes: list[int], share: int) -> None:
    window = Window(share_bytes=share)
    for _ in range(200):
        window.observe(max(sizes))
        if window.grown(window.prefetch) is None:
            break
    assert window.prefetch <= max(window.restart(), share // (max(sizes) + OVERHEAD_BYTES), 1) or window.prefetch == 1
    assert window.prefetch <= PREFETCH_MAX


def test_a_large_message_counts_at_once() -> None:
    window = Window(share_bytes=64 * MIB)
    for _ in range(100):
        window.observe(100)
    window.observe(16 * MIB)
    assert window.shrunk() <= 4
