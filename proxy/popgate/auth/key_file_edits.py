"""Changes the content of the key file: adds, rotates and revokes keys. Comments and the order of the file stay.

A change is made in the lines of the file, if principals and keys have tables with headers, as popgate writes them.
Otherwise tomlkit makes it; alone, it would remove a comment before the table that follows a removed one. Either way the
result is parsed, and compared with the change that was intended. So a file in an unusual form is refused, but never
damaged.
"""

import json
import tomllib
from collections.abc import Callable, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from popgate.auth.key_file import KeyFileError, parse_key_file, shown_time
from popgate.auth.keys import NewKey

Tables: TypeAlias = MutableMapping[str, Any]
Change: TypeAlias = Callable[[Tables], None]
Path: TypeAlias = tuple[str, ...]

HEADING = """\
# The principals that may use popgate, and their API keys (only hashes). Change the keys with: popgate keys
# A running proxy reads this file again when it changes.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPrincipal:
    """A principal that is about to be added: its roles, and the patterns for them by kind (``topics``...)."""

    roles: Sequence[str]
    patterns: dict[str, list[str]]

    def fields(self) -> dict[str, Any]:
        roles = {"role": self.roles[0]} if len(self.roles) == 1 else {"roles": [*self.roles]}
        return {**roles, **self.patterns}


class KeyToAdd(NamedTuple):
    """A new key and the other fields of its table. Times are in Unix seconds."""

    key: NewKey
    created: float
    expires: float | None = None
    note: str | None = None

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"sha256": self.key.digest.hex(), "created": _time(self.created)}
        if self.expires is not None:
            fields["expires"] = _time(self.expires)
        if self.note is not None:
            fields["note"] = self.note
        return fields


def with_key(content: bytes, name: str, principal: NewPrincipal | None, new: KeyToAdd) -> bytes:
    """Return the file with another key of the principal ``name``, which is also added if ``principal`` is given.

    Raises: KeyFileError, also if the result is wrong.
    """
    head = ("principals", name)

    def change(document: Tables) -> None:
        if principal is not None:
            document.setdefault("principals", {})[name] = principal.fields()
        document["principals"][name].setdefault("keys", {})[new.key.id] = new.fields()

    def in_lines(text: _Lines) -> None:
        block = [*_block((*head, "keys", new.key.id), new.fields())]
        if principal is None:
            text.insert_after(head, block)
        else:
            text.append([*_block(head, principal.fields()), "", *block])

    return _changed(content or HEADING.encode(), change, in_lines)


def with_rotated_key(content: bytes, name: str, new: KeyToAdd, old_end: float) -> bytes:
    """Return the file with another key of the principal, whose other keys expire at ``old_end``, or at their own time
    if it is earlier. Raises: KeyFileError."""
    (principal,) = (one for one in parse_key_file(content) if one.principal.name == name)
    ending = [key.id for key in principal.keys if key.expires is None or key.expires > old_end]

    def change(document: Tables) -> None:
        keys = document["principals"][name].setdefault("keys", {})
        for id in ending:
            keys[id]["expires"] = _time(old_end)
        keys[new.key.id] = new.fields()

    def in_lines(text: _Lines) -> None:
        text.set_values({("principals", name, "keys", id) for id in ending}, "expires", shown_time(old_end))
        text.insert_after(("principals", name), _block(("principals", name, "keys", new.key.id), new.fields()))

    return _changed(content, change, in_lines)


def without_key_ids(content: bytes, name_by_id: dict[str, str]) -> bytes:
    """Return the file without keys: ``name_by_id`` maps the id of each to the name of its principal.

    Raises: KeyFileError.
    """

    def change(document: Tables) -> None:
        for id, name in name_by_id.items():
            keys = document["principals"][name]["keys"]
            del keys[id]
            if not keys:
                del document["principals"][name]["keys"]

    def in_lines(text: _Lines) -> None:
        text.remove({("principals", name, "keys", id) for id, name in name_by_id.items()})

    return _changed(content, change, in_lines)


def _changed(content: bytes, change: Change, in_lines: "Callable[[_Lines], None]") -> bytes:
    text = content.decode()
    intended = deepcopy(tomllib.loads(text))
    change(intended)
    for attempt in range(2):
        after = _by_lines(text, in_lines) if attempt == 0 else _by_tomlkit(text, change)
        if after is not None and _is_same(_parsed(after), intended):
            parse_key_file(after.encode())
            return after.encode()
    raise KeyFileError(["the form of the file is unusual, so it can't be changed; give each principal and key a table"])


def _is_same(found: object, intended: Tables) -> bool:
    """Return whether both are the same, apart from tables of keys that are empty."""
    return found is not None and _without_empty_keys(cast("Tables", found)) == _without_empty_keys(intended)


def _without_empty_keys(document: Tables) -> Tables:
    principals: dict[str, dict[str, Any]] = document.get("principals", {})
    return {
        **document,
        "principals": {
            name: {field: value for field, value in one.items() if field != "keys" or value}
            for name, one in principals.items()
        },
    }


def _parsed(text: str) -> object:
    try:
        return tomllib.loads(text)
    except ValueError:
        return None


def _by_tomlkit(text: str, change: Change) -> str | None:
    import tomlkit

    try:
        document = tomlkit.parse(text)
        change(cast("Tables", document))
        return tomlkit.dumps(document)
    except Exception:  # tomlkit fails in several ways on correct files in which a table is in several places
        return None


def _by_lines(text: str, in_lines: "Callable[[_Lines], None]") -> str | None:
    lines = _Lines(text)
    try:
        in_lines(lines)
    except KeyError:
        return None
    return lines.text


# -- lines ------------------------------------------------------------------------------------------------------------


class _Lines:
    """The lines of a TOML file, of which some begin a table. Methods raise KeyError if there is no such table."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    @property
    def text(self) -> str:
        return "\n".join([*self._lines, ""])

    def append(self, block: Sequence[str]) -> None:
        while self._lines and not self._lines[-1].strip():
            self._lines.pop()
        self._lines += ["", *block] if self._lines else block

    def insert_after(self, head: Path, block: Sequence[str]) -> None:
        """Insert the lines after the last table whose path begins with ``head``."""
        ends = [end for path, _, end in self._tables() if path[: len(head)] == head]
        if not ends:
            raise KeyError(head)
        self._lines[ends[-1] : ends[-1]] = ["", *block]

    def set_values(self, paths: set[Path], field: str, value: str) -> None:
        """Set a field in several tables."""
        for start, end in self._places(paths):
            kept = [line for line in self._lines[start + 1 : end] if line.partition("=")[0].strip() != field]
            self._lines[start + 1 : end] = [*kept, f"{field} = {value}"]

    def remove(self, paths: set[Path]) -> None:
        """Remove tables. Comments after the last value of each stay, because they belong to what follows."""
        for start, end in self._places(paths):
            first = start
            while first and not self._lines[first - 1].strip():
                first -= 1
            del self._lines[first:end]

    def _places(self, paths: set[Path]) -> list[tuple[int, int]]:
        """Return where the tables begin and end, the last one first: a change of one moves only those behind it."""
        found = {path: (start, end) for path, start, end in reversed(self._tables()) if path in paths}
        if found.keys() != paths:
            raise KeyError(paths - found.keys())
        return [*found.values()]

    def _tables(self) -> list[tuple[Path, int, int]]:
        """Return the path of each table, the number of its first line, and that after its last value."""
        tables: list[tuple[Path, int, int]] = []
        for number, line in enumerate(self._lines):
            words = line.strip()
            path = _path_in(words) if words.startswith("[") else None
            if path is not None:
                tables.append((path, number, number + 1))
            elif tables and words and not words.startswith("#"):
                tables[-1] = (*tables[-1][:2], number + 1)
        return tables


def _path_in(header: str) -> Path | None:
    """Return the path in the header of a table, or None if the line is none."""
    try:
        table: Any = tomllib.loads(header)
    except ValueError:
        return None
    path: list[str] = []
    while isinstance(table, dict) and table:
        ((name, table),) = cast("dict[str, Any]", table).items()
        path.append(name)
    return tuple(path) if isinstance(table, dict) else None


def _block(path: Path, fields: dict[str, Any]) -> list[str]:
    """Return the lines of a table."""
    head = ".".join(_shown(part) if "." in part or "@" in part else part for part in path)
    return [f"[{head}]", *(f"{name} = {_shown(value)}" for name, value in fields.items())]


def _shown(value: Any) -> str:
    if isinstance(value, (str, list)):  # a JSON text without control characters is also a TOML text
        return json.dumps(value, ensure_ascii=False)
    return shown_time(value.timestamp())


def _time(seconds: float) -> Any:
    return tomllib.loads(f"at = {shown_time(seconds)}")["at"]
