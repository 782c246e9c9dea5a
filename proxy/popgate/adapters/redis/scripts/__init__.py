"""Builds the scripts that Redis runs from the Lua files in this folder. A script calls one of the files' functions.

Each file covers one subject, and its header describes the keys and the arguments. A script is one chunk of Lua, so that
code from different files can share local definitions. It contains the call, and only the definitions that the called
function needs, because Redis creates all functions of a script anew at each call. With the definitions of all files, a
single lease would take 3 to 6 % longer.
"""

import re
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

_FILES = (
    *("prelude", "catalog", "assignments", "cluster", "dedup", "modes", "records", "queues", "attempts", "granting"),
    *("limits", "settling", "groups", "members"),
)
"""The Lua files in an order in which each definition uses only earlier definitions."""


class Script(NamedTuple):
    """The name of the function that a script calls, the script's text, and its SHA-1, by which Redis identifies it."""

    name: str
    text: bytes
    sha: str


class _Definition(NamedTuple):
    names: set[str]
    text: str
    words: set[str]


@cache
def script(name: str) -> Script:
    """Return the script that calls the function ``name`` with the arguments that are packed in ``ARGV[3]``."""
    parts = [f"return {name}(unpack(cmsgpack.unpack(ARGV[3])))"]
    needed = {name, _CHECKED}
    for one in reversed(_definitions()):
        if one.names & needed:
            parts.append(one.text)
            needed |= one.words
    text = "\n".join(reversed(parts)).encode()
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest())


@cache
def _definitions() -> list[_Definition]:
    code = "\n".join(_COMMENT.sub("", files(__name__).joinpath(f"{file}.lua").read_text()) for file in _FILES)
    texts = [text.strip() for text in _DEFINITION.split(code) if text.strip()]
    return [_Definition(_words(_NAMES.split(text)[1]), text, _words(text)) for text in texts]


_CHECKED = "present"
"""The definition that every script needs: it checks the incarnation."""
_COMMENT = re.compile(r" *--.*")
_DEFINITION = re.compile(r"^(?=local )", re.MULTILINE)
_NAMES = re.compile(r"^local (?:function )?([\w, ]+)")
_WORD = re.compile(r"'[^']*'|[.:]\w+|([a-zA-Z_]\w*)")


def _words(text: str) -> set[str]:
    """Return the identifiers in a Lua text. Names of fields and words in strings are not included."""
    return {*_WORD.findall(text)}
