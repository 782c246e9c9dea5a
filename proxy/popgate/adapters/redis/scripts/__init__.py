"""The scripts that Redis runs: each call of a port is one script, built here from the Lua files of this folder.

A file does one thing. A script is the concatenation of the files that ``_PARTS`` lists for it: they share locals, as
one chunk of Lua.
"""

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

_LEASES = ("prelude", "record", "records")
_GROUPS = (*_LEASES, "groups", "members")
_PARTS: dict[str, tuple[str, ...]] = {
    "incarnation": ("incarnation", "catalog_changed", "named"),
    "grant": ("prelude", "record", "decide_grant", "grant_new", "records", "counting", "granting", "grant"),
    "settle": ("prelude", "record", "decide_settle", "settle_alike", "records", "settle"),
    "grant_for_group": (*_GROUPS, "counting", "decide_grant", "granting", "grant_for_group"),
    "claim": (*_LEASES, "epochs", "claim"),
    "restore": (*_LEASES, "epochs", "restore"),
    "allow_mode": ("prelude", "allow_mode"),
    "load": (*_LEASES, "load"),
    "peek": (*_LEASES, "peek"),
    "find_attempt": (*_LEASES, "attempts", "find_attempt"),
    "end_attempts": (*_LEASES, "attempts", "end_attempts"),
    "trim": (*_LEASES, "trim"),
    "collect": (*_LEASES, "collect"),
    "forget": (*_LEASES, "forget"),
    "drop_queue": (*_LEASES, "drop_queue"),
    "queues": ("prelude", "queues"),
    "vacancy": (*_LEASES, "counting", "vacancy"),
    "begin_count": (*_LEASES, "begin_count"),
    "count_part": (*_LEASES, "count_part"),
    "end_count": ("prelude", "end_count"),
    "keep_limits": (*_LEASES, "counting", "keep_limits"),
    "reserve": ("prelude", "dedup", "reserve"),
    "confirm": ("prelude", "dedup", "confirm"),
    "cancel": ("prelude", "dedup", "cancel"),
    "drop_topic": ("prelude", "dedup", "drop_topic"),
    "collect_ids": ("prelude", "dedup", "collect_ids"),
    "begin_group": ("prelude", "groups", "begin_group"),
    "freeze_group": ("prelude", "groups", "freeze_group"),
    "find_group": ("prelude", "groups", "find_group"),
    "list_groups": ("prelude", "groups", "list_groups"),
    "count_members": ("prelude", "groups", "count_members"),
    "read_members": (*_GROUPS, "read_members"),
    "begin_renewal": ("prelude", "groups", "begin_renewal"),
    "renew_group": (*_GROUPS, "decide_grant", "decide_settle", "renew_group"),
    "begin_ack": ("prelude", "groups", "begin_ack"),
    "begin_release": ("prelude", "groups", "begin_release"),
    "settle_next": (*_GROUPS, "decide_settle", "settle_next"),
    "group_homes": ("prelude", "group_homes"),
    "half_settled": ("prelude", "groups", "half_settled"),
    "collect_groups": ("prelude", "groups", "collect_groups"),
    "drop_groups": ("prelude", "groups", "drop_groups"),
    "put": ("prelude", "put", "done"),
    "add": ("prelude", "add"),
    "find": ("prelude", "find"),
    "delete": ("prelude", "delete", "done"),
    "read": ("prelude", "read"),
    "change_spec": ("prelude", "unless_changed", "put", "catalog_changed", "done"),
    "now": ("prelude", "now"),
    "put_spec": ("prelude", "put", "catalog_changed", "done"),
    "delete_spec": ("prelude", "delete", "catalog_changed", "done"),
    "delete_topic": ("prelude", "delete_topic", "catalog_changed", "done"),
    "reserve_tokens": ("prelude", "reserve_tokens"),
    "read_assignment": ("prelude", "assignments", "read_assignment"),
    "write_assignment": ("prelude", "assignments", "write_assignment"),
    "drop_assignment": ("prelude", "assignments", "drop_assignment"),
    "join": ("prelude", "cluster", "owning", "join"),
    "beat": ("prelude", "cluster", "beat"),
    "own": ("prelude", "cluster", "owning", "own"),
    "disown": ("prelude", "cluster", "disown"),
    "remove_member": ("prelude", "cluster", "remove_member"),
}


class Script(NamedTuple):
    """The text of a script, and the name under which Redis keeps it."""

    name: str
    text: bytes
    sha: str


@cache
def script(name: str) -> Script:
    folder = files(__name__)
    text = b"\n".join(folder.joinpath(f"{part}.lua").read_bytes() for part in _PARTS[name])
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest())
