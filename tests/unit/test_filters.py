"""Filters on headers: which messages pass."""

from collections.abc import Mapping, Sequence

import pytest

from popgate.domain.filters import FilterValue, header_filter


@pytest.mark.parametrize(
    ("wanted", "headers", "passes"),
    [
        ({"a": ["x"]}, {"a": "x"}, True),
        ({"a": ["x"]}, {"a": "y"}, False),
        ({"a": ["x", "y"]}, {"a": "y", "b": "z"}, True),
        ({"a": ["x"], "b": ["z"]}, {"a": "x"}, False),
        ({"a": ["x"], "b": ["z"]}, {"a": "x", "b": "z"}, True),
        ({"a": [None]}, {}, True),
        ({"a": [None]}, {"a": None}, True),
        ({"a": [None]}, {"a": ""}, False),
        ({"a": [1]}, {"a": 1.0}, True),
        ({"a": [1]}, {"a": True}, False),
        ({"a": [True]}, {"a": 1}, False),
        ({"a": [False]}, {}, False),
        ({"a": [0]}, {"a": False}, False),
        ({"a": ["1"]}, {"a": 1}, False),
        ({"a": ["x"]}, {"a": ["x"]}, False),
        ({"a": ["x"]}, {"a": {"x": 1}}, False),
        ({"a": ["x"]}, {"a": b"x"}, False),
        ({"A": ["x"]}, {"a": "x"}, False),
    ],
)
def test_every_named_header_must_have_one_of_its_values(
    wanted: Mapping[str, Sequence[FilterValue]], headers: Mapping[str, object], passes: bool
) -> None:
    assert header_filter(wanted)(headers) is passes
