"""Reads and checks the fields of tables in the key file, and collects all that is wrong.

A wrong value is shown only if it is a short word: anything else may be a key that was put into the wrong place.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import cast

from popgate.auth.keys import PREFIX

PROBLEMS_MAX = 100
"""Maximum number of problems that are collected."""
WORD_LENGTH_MAX = 30
YEAR_MIN, YEAR_MAX = 1971, 9998
"""Bounds of times. Within them, a time in any time zone is also a time in UTC."""

_WORD = re.compile(rf"[A-Za-z0-9._@ -]{{1,{WORD_LENGTH_MAX}}}")
_SIZE = re.compile(r"([0-9]{1,15}) ?(B|KiB|MiB|GiB|kB|KB|MB|GB)?")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class Problems:
    """All that is wrong with a file, as lines."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, where: str, field: str, text: str) -> None:
        if len(self.found) < PROBLEMS_MAX:
            self.found.append(f"{f'{where}: ' if where else ''}{f'{field} ' if field else ''}{text}")


class Fields:
    """The fields of one table. A method returns the value of a field, or None if it is missing or wrong."""

    def __init__(self, table: Mapping[str, object], where: str, problems: Problems, *, known: Collection[str]) -> None:
        self._table = table
        self.where = where
        self.problems = problems
        for name in table:
            if name not in known:
                self.add("", _unknown(name, known))

    def __contains__(self, field: str) -> bool:
        return field in self._table

    def add(self, field: str, text: str) -> None:
        self.problems.add(self.where, field, text)

    def table(self, field: str) -> dict[str, object] | None:
        value = self._table.get(field)
        if value is None or isinstance(value, dict):
            return cast("dict[str, object] | None", value)
        self.add(field, "must be a table")
        return None

    def tables(self, field: str, count_max: int) -> list[dict[str, object]]:
        value = self._table.get(field, [])
        tables = cast("list[object]", value) if isinstance(value, list) else [None]
        if not all(isinstance(table, dict) for table in tables):
            self.add(field, 'must be a list of tables, such as [{actions = ["publish"], topics = ["orders.*"]}]')
            return []
        if len(tables) > count_max:
            self.add(field, f"must be at most {count_max}, not {len(tables)}")
            return []
        return cast("list[dict[str, object]]", tables)

    def word(self, field: str, known: Collection[str]) -> str | None:
        """Return one of the ``known`` words."""
        value = self._table.get(field)
        if value is None or (isinstance(value, str) and value in known):
            return value
        self.add(field, _wrong_word(value, known))
        return None

    def words(self, field: str, known: Collection[str], *, required: bool = False) -> list[str]:
        """Return a list of ``known`` words. A list that is given has at least one."""
        value = self._table.get(field)
        if value is None and not required:
            return []
        words = cast("list[object]", value) if isinstance(value, list) else []
        if not words:
            self.add(field, f"must be a list of one or more of: {', '.join(known)}")
        for word in words:
            if not isinstance(word, str) or word not in known:
                self.add(field, _wrong_word(word, known))
        return [word for word in words if isinstance(word, str) and word in known]

    def text(self, field: str, form: re.Pattern[str], length_max: int) -> str | None:
        value = self._table.get(field)
        if value is None or _is_text(value, form, length_max):
            return cast("str | None", value)
        self.add(field, f"must be a text of 1 to {length_max} printable characters")
        return None

    def texts(
        self, field: str, form: re.Pattern[str], length_max: int, count_max: int, what: str
    ) -> tuple[str, ...] | None:
        """Return a list of texts without repetitions."""
        value = self._table.get(field)
        if value is None:
            return None
        texts = cast("list[object]", value) if isinstance(value, list) else []
        if not texts or not all(_is_text(text, form, length_max) for text in texts):
            self.add(field, f"must be a list of {what}, texts of 1 to {length_max} printable characters")
            return None
        if len(texts) > count_max:
            self.add(field, f"must be at most {count_max} {what}, not {len(texts)}")
            return None
        return tuple(dict.fromkeys(cast("list[str]", texts)))

    def whole(self, field: str, minimum: int, maximum: int) -> int | None:
        value = self._table.get(field)
        if value is None or (type(value) is int and minimum <= value <= maximum):
            return value
        self.add(field, f"must be a whole number from {minimum} to {maximum}")
        return None

    def number(self, field: str, minimum: float, maximum: float) -> float | None:
        value = self._table.get(field)
        if value is None:
            return None
        if type(value) not in (int, float) or not minimum <= cast("float", value) <= maximum:
            self.add(field, f"must be a number from {minimum:g} to {maximum:.15g}")
            return None
        return float(cast("float", value))

    def size(self, field: str, minimum: int, maximum: int) -> int | None:
        """Return a number of bytes, which is given as a whole number, or as a text with a unit."""
        value = self._table.get(field)
        if value is None:
            return None
        size = value if type(value) is int else -1
        if isinstance(value, str) and (match := _SIZE.fullmatch(value)) is not None:
            size = int(match[1]) * _UNITS[match[2] or "B"]
        if not minimum <= size <= maximum:
            self.add(field, f'must be a size such as "64MiB", or a number of bytes from {minimum} to {maximum}')
            return None
        return size

    def time(self, field: str, *, required: bool = False) -> datetime | None:
        value = self._table.get(field)
        if value is None and not required:
            return None
        if not isinstance(value, datetime) or value.tzinfo is None or not YEAR_MIN <= value.year <= YEAR_MAX:
            self.add(field, "must be a time with a time zone and without quotes, such as 2026-11-26T12:00:00Z")
            return None
        return value

    def digest(self, field: str, length: int) -> bytes:
        """Return a hash that is given as hexadecimal digits. A wrong one is zeros, and never shown."""
        value = self._table.get(field)
        if isinstance(value, str) and re.fullmatch(f"[0-9A-Fa-f]{{{2 * length}}}", value) is not None:
            return bytes.fromhex(value)
        self.add(field, f"must be {2 * length} hexadecimal digits in quotes")
        return bytes(length)


def _is_text(value: object, form: re.Pattern[str], length_max: int) -> bool:
    return isinstance(value, str) and len(value) <= length_max and form.fullmatch(value) is not None


def _wrong_word(value: object, known: Collection[str]) -> str:
    return f"must be one of {', '.join(known)}{not_this(value)}{_similar(value, known)}"


def not_this(value: object) -> str:
    """Return a hint that shows a wrong value if it is a short word, and no part of a key."""
    is_word = isinstance(value, str) and _WORD.fullmatch(value) is not None and not value.startswith(PREFIX)
    return f", not {value!r}" if is_word else ""


def _unknown(name: str, known: Iterable[str]) -> str:
    if not not_this(name):
        return f"has an unknown field; known are: {', '.join(known)}"
    return f"has no field {name!r}{_similar(name, known) or '; known are: ' + ', '.join(known)}"


def _similar(value: object, known: Iterable[str]) -> str:
    close = get_close_matches(value, known, n=1) if isinstance(value, str) and len(value) <= WORD_LENGTH_MAX else []
    return f"; did you mean {close[0]!r}?" if close else ""
