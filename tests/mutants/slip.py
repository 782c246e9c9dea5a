"""What a slip is: a small mistake in one place of the product, and the tests that should notice it.

A slip is one that a tired author or a careless merge could make: a boundary off by one, a condition turned around, a
step left out. ``unnoticed`` explains one that no test can notice, because nothing that is promised depends on it.
"""

from typing import NamedTuple


class Slip(NamedTuple):
    """In ``file``, below ``proxy/popgate`` or in ``clients``, ``before`` stands exactly once. ``tests`` are below
    ``tests``: those that hold what the line promises, and are quick."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    unnoticed: str = ""
