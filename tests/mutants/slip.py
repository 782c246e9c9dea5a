"""The type of a slip: a small mistake in one place of the product, and the tests that should notice it.

A slip is a mistake that a tired author or a careless merge could make: a boundary off by one, an inverted condition, a
missing step. ``unnoticed`` explains a slip that no test can notice, because no promise depends on it.
"""

from typing import NamedTuple


class Slip(NamedTuple):
    """``before`` occurs exactly once in ``file``, which is below ``proxy/popgate`` or in ``clients``. ``tests`` are
    below ``tests``: the quick ones that check what the line promises.
    """

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    unnoticed: str = ""
