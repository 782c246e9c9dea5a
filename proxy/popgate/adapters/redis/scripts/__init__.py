"""The scripts that Redis runs: each call of a port is one script, built here from the Lua files of this folder.

A file holds one concern: its header names the keys and the arguments, and each call is a function in it. A script is
the prelude, the files that the call's file needs, that file, and the call of the function: one chunk of Lua, so the
files share their locals.
"""

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

_NEEDS: dict[str, tuple[str, ...]] = {
    "prelude": (),
    "catalog": ("prelude",),
    "assignments": ("prelude",),
    "cluster": ("prelude",),
    "dedup": ("prelude",),
    "modes": ("prelude",),
    "records": ("prelude",),
    "queues": ("records",),
    "attempts": ("records",),
    "granting": ("modes", "attempts"),
    "limits": ("granting",),
    "settling": ("modes", "records"),
    "groups": ("prelude",),
    "members": ("limits", "settling", "groups"),
}
"""The files, and the other files that each needs."""


class Script(NamedTuple):
    """The text of a script, and the name under which Redis keeps it."""

    name: str
    text: bytes
    sha: str


@cache
def script(name: str) -> Script:
    """Return the script that calls the function ``name`` with the arguments that its caller has packed."""
    definition = f"\nlocal function {name}(".encode()
    (file,) = [file for file in _NEEDS if definition in _text(file)]
    call = f"return {name}(unpack(cmsgpack.unpack(ARGV[3])))\n".encode()
    text = b"\n".join((*map(_text, dict.fromkeys(_with_needs(file))), call))
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest())


def _with_needs(file: str) -> list[str]:
    return [*(one for needed in _NEEDS[file] for one in _with_needs(needed)), file]


@cache
def _text(file: str) -> bytes:
    return files(__name__).joinpath(f"{file}.lua").read_bytes()
