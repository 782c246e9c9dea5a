"""The scripts that Redis runs: each call of a port is one script, built here from the Lua files of this folder.

A file holds one concern: its header names the keys and the arguments, and each call is a function in it. A script is
one chunk of Lua, so that the files share their locals: the definitions that the call needs, and the call. The others
are left out, because Redis makes all functions of a script afresh at each call: with all of its files, a single lease
takes 3 to 6 % longer.
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
"""The files in the order of their definitions: a definition uses only earlier ones."""


class Script(NamedTuple):
    """The text of a script, and the name under which Redis keeps it."""

    name: str
    text: bytes
    sha: str


class _Definition(NamedTuple):
    names: set[str]
    text: str
    words: set[str]


@cache
def script(name: str) -> Script:
    """Return the script that calls the function ``name`` with the arguments that its caller has packed."""
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
    """Return the names in a text, without those of fields and in strings."""
    return {*_WORD.findall(text)}
