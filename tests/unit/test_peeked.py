"""Cursors of peeked messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.errors import InvalidRequest
from popgate.domain.names import CopyId
from popgate.domain.peeked import CURSOR_PATTERN, cursor_of, place_of_cursor


@given(st.integers(0, 2**120), st.integers(0, 255), st.text(min_size=1, max_size=80))
def test_a_cursor_names_its_place_for_any_copy_id(rank: int, queue: int, copy_id: str) -> None:
    place = rank, queue, CopyId(copy_id)
    assert place_of_cursor(cursor_of(place)) == place


@given(st.from_regex(CURSOR_PATTERN, fullmatch=True))
def test_what_has_the_form_of_a_cursor_is_read(cursor: str) -> None:
    place_of_cursor(cursor)


@pytest.mark.parametrize(
    "cursor", ["", "1", "1.2", "1.2.", "x.0.a", "1.x.a", "1.0.a b", "1.0.é", "-1.0.a", "1.99999.a"]
)
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidRequest):
        place_of_cursor(cursor)
