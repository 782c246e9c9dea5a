"""Reads the answers of the HTTP interface."""

from collections.abc import Iterable
from typing import Any

import httpx

Json = Any


def answer(response: httpx.Response, *statuses: int) -> Json:
    """Return the body of a response, or None if it has none. Its status must be one of these, or 200."""
    assert response.status_code in (statuses or (200,)), response.text
    return response.json() if response.content else None


def bodies(messages: Iterable[Json]) -> list[str]:
    """Return the bodies of popped messages."""
    return [message["body"] for message in messages]
