"""Explains to a client why the body of its request could not be read. The error names the field and the remedy.

This module translates msgspec's error messages. The types in ``requests`` define which values are allowed.
"""

import re
from collections.abc import Sequence

from msgspec import Struct, ValidationError

from popgate.api.requests import (
    ErrorEntry,
    ExtendEntry,
    PublishEntry,
    RejectEntry,
    RejectRequest,
    ReleaseEntry,
    ReleaseRequest,
)
from popgate.domain.errors import InvalidRequest

QUOTED_LENGTH_MAX = 80
MESSAGE_LENGTH_MAX = 2_000
"""Maximum number of characters of a message of msgspec that are read. It contains the name of an unknown field."""
ACCEPTED = "popgate reads application/json and application/msgpack"

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<trouble>contains unknown field|missing required field) `(?P<name>.*)`$", re.DOTALL)
_LENGTH = re.compile(r"^Expected `(?P<kind>\w+)` of length (?P<sign>[<>]=) (?P<limit>\d+)$")
_RANGE = re.compile(r"^Expected `\w+` (?P<sign>[<>]=?) (?P<limit>[-+.\de]+)$")
_TYPE = re.compile(r"^Expected `(?P<kind>[\w |]+)`, got `(?P<found>[\w |]+)`$")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "bytes": "bytes",
    "ext": "an extension",
}
_SIGNS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


class UnreadableBody(InvalidRequest):
    """The body is neither valid JSON nor valid MessagePack."""


def complaint(error: Exception, request_type: type[Struct], body: bytes, *, packed: bool) -> InvalidRequest:
    """Return the error for the client. ``error`` is the exception that decoding ``body`` as ``request_type`` has
    raised."""
    if packed and body[:1] == b"{":
        return UnreadableBody(
            "the body is not valid MessagePack: it looks like JSON; set content-type accordingly", field=""
        )
    if isinstance(error, ValidationError):
        return _invalid(str(error), request_type)
    if isinstance(error, RecursionError):
        return UnreadableBody("the body is nested too deeply", field="")
    name = "MessagePack" if packed else "JSON"
    if isinstance(error, UnicodeDecodeError):
        return UnreadableBody(f"the body is not valid {name}: it contains text that is not valid UTF-8", field="")
    hint = ""
    if not packed and _LONE_SURROGATE.search(body):
        hint = "; a lone surrogate escape such as \\ud800 is not a character"
    reason = "it is empty" if not body else str(error).removeprefix("JSON is malformed: ")
    return UnreadableBody(f"the body is not valid {name} ({reason}{hint}); {ACCEPTED}", field="")


def _invalid(message: str, request_type: type[Struct]) -> InvalidRequest:
    if len(message) > MESSAGE_LENGTH_MAX:  # the field is named at the beginning or at the end
        message = f"{message[: MESSAGE_LENGTH_MAX // 2]}...{message[-MESSAGE_LENGTH_MAX // 2 :]}"
    match = _PLACE.match(message)
    assert match is not None, "the pattern takes any text"
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if match["key"]:
        return InvalidRequest(f"{path or 'the body'}: names must be strings", field=path)
    named = _NAMED.match(what)
    if named is None:
        return InvalidRequest(f"{path or 'the body'} {_requirement(what)}", field=path)
    name = named["name"]
    field = f"{path}.{name}" if path else name
    if named["trouble"].startswith("missing"):
        return InvalidRequest(f"{field} is required", field=field)
    return unknown_field(field[:QUOTED_LENGTH_MAX], _known_fields(path, request_type))


def unknown_field(field: str, known: Sequence[str] = ()) -> InvalidRequest:
    """Return the error for an unknown field. The error lists the ``known`` fields."""
    remedy = f"; the fields are {', '.join(known)}" if known else ""
    return InvalidRequest(f"{field} is not a field here{remedy}", field=field)


def _known_fields(path: str, request_type: type[Struct]) -> tuple[str, ...]:
    if not path:
        return request_type.__struct_fields__
    if path.startswith("messages["):
        return PublishEntry.__struct_fields__
    if path.endswith(".error"):
        return ErrorEntry.__struct_fields__
    if request_type is ReleaseRequest:
        return ReleaseEntry.__struct_fields__
    return (RejectEntry if request_type is RejectRequest else ExtendEntry).__struct_fields__


def _requirement(what: str) -> str:
    if match := _TYPE.match(what):
        wanted = " or ".join(_WORDS.get(kind, kind) for kind in match["kind"].split(" | "))
        return f"must be {wanted}, not {_WORDS.get(match['found'], match['found'])}"
    if match := _LENGTH.match(what):
        unit = {"array": "entries", "str": "characters"}.get(match["kind"], "entries")
        return f"must have {_SIGNS[match['sign']]} {match['limit']} {unit}"
    if match := _RANGE.match(what):
        return f"must be {_SIGNS[match['sign']]} {match['limit'].removesuffix('.0')}"
    if what.endswith("out of range"):
        return "is a number out of range"
    return f"is not valid: {what}"
