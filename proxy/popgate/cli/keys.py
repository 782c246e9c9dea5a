"""Defines ``popgate keys``, which adds, lists, rotates and revokes the API keys in a key file.

The commands change a file only. They don't talk to a proxy. A running proxy notices the change.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from popgate import config
from popgate.auth.keys import without_credentials
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Command, Commands, Parser, add_output_flags, add_plain_command
from popgate.cli.former_flags import add_former
from popgate.cli.printing import Column, JsonObject, Printer, complain, field, note, output_of, print_list

if TYPE_CHECKING:
    from popgate.auth.key_file import KnownPrincipal
    from popgate.auth.key_file_edits import KeyToAdd, NewPrincipal

KEEP_SECONDS = 86_400
DURATION_SECONDS_MAX = 100 * 365 * 86_400
EPILOG = """\
A principal is a program, a team or a person that uses popgate. Its roles and patterns say what it may do. Each key
proves that a client is this principal. The file contains the principals, and only hashes of the keys. All proxies need
the same file (popgate serve --keys-file FILE), and read it again within a second after it changes.

roles:
  publisher       publish
  consumer        pop, pull, settle, use lease groups, read dead letters
  worker          publish, consume, and read states and lists
  creator         create topics and groups, also by publishing and popping
  lock-user       acquire, renew and release locks
  monitor         read /metrics
  operator        read states, lists and /metrics, and create topics and groups
  administrator   everything

For finer permissions and for limits, edit the file (docs/security.md).

examples:
  export POPGATE_KEYS_FILE=/etc/popgate/keys.toml
  popgate keys add orders-app --role worker --topics 'orders.*' --groups billing
  popgate keys list
  popgate keys rotate orders-app --keep-old 24h
  popgate keys revoke k3v7mq2xaz
"""
ADD_EPILOG = """\
Prints the key on standard output. It is shown only now: the file contains its hash. If the principal exists, it gets
another key, and its permissions stay. The file is created if it is missing, and may be empty.

In a pattern, * matches any characters. Without --topics and --groups, a role applies to all of them. With one of them,
a role applies only to the locks in --locks.

examples:
  popgate keys add orders-app --role worker --topics 'orders.*' --groups billing
  popgate keys add shop --role publisher --topics orders,returns --expires 90d --note 'the shop in Frankfurt'
  popgate keys add prometheus --role monitor -o json
  popgate keys add alice --role administrator --file /etc/popgate/keys.toml
"""
LIST_EPILOG = """\
Shows the ids of the keys, never the keys. A principal without keys is listed, too.

examples:
  popgate keys list
  popgate keys list -o json --file /etc/popgate/keys.toml
"""
ROTATE_EPILOG = """\
Adds a key and prints it. The principal's other keys expire after --keep-old, so that clients can change to the new key
without an interruption.

examples:
  popgate keys rotate orders-app
  popgate keys rotate orders-app --keep-old 7d --expires 90d
"""
REVOKE_EPILOG = """\
Proxies refuse a revoked key within a second, and end its waiting requests. Leases stay, and another key of the
principal can settle them.

examples:
  popgate keys revoke k3v7mq2xaz
  popgate keys revoke --principal orders-app
"""
COLUMNS = (
    Column("KEY", field("key")),
    Column("PRINCIPAL", field("principal")),
    Column("ROLES", lambda row: ", ".join(row["roles"]) or "-"),
    Column("CREATED", field("created")),
    Column("EXPIRES", field("expires", "never")),
    Column("STATE", field("state")),
    Column("NOTE", field("note")),
)
ADDED_COLUMNS = (
    Column("ID", field("id")),
    Column("PRINCIPAL", field("principal")),
    Column("EXPIRES", field("expires", "never")),
    Column("KEY", field("key")),
)


def add_parser(commands: Commands) -> None:
    parser = add_plain_command(commands, "keys", "add, list, rotate and revoke API keys", EPILOG)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    one = _action(actions, "add", add, "add a key, and its principal if it is new", ADD_EPILOG)
    one.add_argument("name", metavar="NAME", help="name of the principal: 1 to 64 of A-Z a-z 0-9 . _ @ -")
    one.add_argument("--role", type=_names, action="extend", metavar="ROLES", help="roles of a new principal")
    for kind in ("topics", "groups", "locks", "queues"):
        what = "queues of the broker that may be adopted" if kind == "queues" else f"{kind} to which the roles apply"
        one.add_argument(
            f"--{kind}", type=_names, action="extend", metavar="PATTERNS", help=f"{what}, with commas between them"
        )
    _add_key_flags(one)

    one = _action(actions, "list", show, "show the principals and the ids of their keys", LIST_EPILOG)
    add_output_flags(one)

    one = _action(actions, "rotate", rotate, "add a key, and let the old ones expire", ROTATE_EPILOG)
    one.add_argument("name", metavar="NAME", help="name of the principal")
    one.add_argument(
        "--keep-old",
        type=_duration(0),
        default=KEEP_SECONDS,
        metavar="TIME",
        help="how long the old keys remain valid, such as 30m, 24h or 7d (default: 24h)",
    )
    _add_key_flags(one)

    one = _action(actions, "revoke", revoke, "remove keys", REVOKE_EPILOG)
    one.add_argument("ids", metavar="KEY_ID", nargs="*", help="id of a key, which 'popgate keys list' shows")
    one.add_argument("--principal", metavar="NAME", help="remove all keys of this principal")
    add_former(one, "--all", "--principal")
    add_output_flags(one)


def _action(actions: Commands, name: str, run: Command, help: str, epilog: str) -> Parser:
    parser = add_plain_command(actions, name, help, epilog)
    parser.add_argument("--file", type=Path, metavar="FILE", help="the key file (default: POPGATE_KEYS_FILE)")
    parser.set_defaults(run=run)
    return parser


def _add_key_flags(parser: Parser) -> None:
    parser.add_argument(
        "--expires",
        type=_duration(1),
        metavar="TIME",
        help="how long the key is valid, such as 12h or 90d (default: always)",
    )
    parser.add_argument("--note", type=_note, metavar="TEXT", help="a remark, which 'popgate keys list' shows")
    add_output_flags(parser, default="the bare key")


# -- commands ---------------------------------------------------------------------------------------------------------


def add(arguments: argparse.Namespace) -> int:
    from popgate.auth.key_file_edits import with_key

    name = arguments.name
    roles: Sequence[str] = tuple(dict.fromkeys(arguments.role or ()))
    kinds = ("topics", "groups", "locks", "queues")
    patterns: dict[str, list[str]] = {
        kind: [*dict.fromkeys(given)] for kind in kinds if (given := getattr(arguments, kind))
    }
    new = _new_key(arguments)

    def change(content: bytes, known: "Sequence[KnownPrincipal]") -> bytes:
        exists = any(one.principal.name == name for one in known)
        if exists and (roles or patterns):
            raise CommandFailed(
                f"{name} exists in {_file(arguments)}: leave out the role and the patterns to add a key, or edit the "
                "file to change the permissions",
                ExitCode.USAGE,
            )
        return with_key(content, name, None if exists else _new_principal(name, roles, patterns), new)

    _change(arguments, change, may_create=True)
    return _print_key(arguments, name, new)


def _new_principal(name: str, roles: Sequence[str], patterns: dict[str, list[str]]) -> "NewPrincipal":
    from popgate.auth.key_file import PRINCIPAL_NAME
    from popgate.auth.key_file_edits import NewPrincipal
    from popgate.auth.roles import ROLES

    if PRINCIPAL_NAME.fullmatch(name) is None or without_credentials(name) != name:
        raise CommandFailed("NAME must be 1 to 64 of A-Z a-z 0-9 . _ @ -, and no key", ExitCode.USAGE)
    if not roles:
        raise CommandFailed(f"{name} is new: give it a --role ({', '.join(ROLES)})", ExitCode.USAGE)
    for role in roles:
        if role not in ROLES:
            raise CommandFailed(f"--role: must be of {', '.join(ROLES)}, not {role!r}", ExitCode.USAGE)
    return NewPrincipal(roles=roles, patterns=patterns)


def rotate(arguments: argparse.Namespace) -> int:
    from popgate.auth.key_file_edits import with_rotated_key

    new = _new_key(arguments)

    def change(content: bytes, known: "Sequence[KnownPrincipal]") -> bytes:
        _require(arguments, arguments.name, known)
        return with_rotated_key(content, arguments.name, new, new.created + arguments.keep_old)

    _change(arguments, change)
    return _print_key(arguments, arguments.name, new)


def revoke(arguments: argparse.Namespace) -> int:
    from popgate.auth.key_file_edits import without_key_ids

    if bool(arguments.ids) == (arguments.principal is not None):
        raise CommandFailed("name the keys by their ids, or the principal with --principal", ExitCode.USAGE)
    revoked: list[str] = []

    def change(content: bytes, known: "Sequence[KnownPrincipal]") -> bytes:
        names = {key.id: one.principal.name for one in known for key in one.keys}
        if arguments.principal is not None:
            _require(arguments, arguments.principal, known)
            revoked[:] = [id for id, name in names.items() if name == arguments.principal]
        else:
            revoked[:] = dict.fromkeys(_id_of(text) for text in arguments.ids)
        if unknown := [id for id in revoked if id not in names]:
            raise CommandFailed(
                f"{_file(arguments)} has no key with the id {', '.join(unknown)}; see: popgate keys list"
            )
        return without_key_ids(content, {id: names[id] for id in revoked}) if revoked else content

    _change(arguments, change)
    if not revoked:
        note(arguments, f"{arguments.principal} has no keys")
        return ExitCode.OK
    note(arguments, f"revoked {', '.join(revoked)}; running proxies read the file within a second")
    return ExitCode.OK


def show(arguments: argparse.Namespace) -> int:
    from popgate.auth.key_file import shown_time

    _, known = _read(arguments)
    now = time.time()
    rows: list[JsonObject] = []
    for one in known:
        head = {"principal": one.principal.name, "roles": one.roles}
        if not one.keys:
            state = "certificate only" if one.certificates else "no key"
            rows.append({"key": None, **head, "created": None, "expires": None, "state": state, "note": None})
        for key in one.keys:
            expires = None if key.expires is None else shown_time(key.expires)
            state = "valid" if key.expires is None or key.expires > now else "expired"
            times = {"created": shown_time(key.created), "expires": expires}
            note = None if key.note is None else without_credentials(key.note)
            rows.append({"key": key.id, **head, **times, "state": state, "note": note})
    print_list(arguments, COLUMNS, rows, nothing="no principals; add one with: popgate keys add NAME --role ROLE")
    return ExitCode.OK


# -- the file ---------------------------------------------------------------------------------------------------------


def _file(arguments: argparse.Namespace) -> Path:
    named = arguments.file or config.environment().get("POPGATE_KEYS_FILE")
    if not named:
        raise CommandFailed("name the key file with --file, or in POPGATE_KEYS_FILE", ExitCode.USAGE)
    return Path(named).expanduser().absolute()


def _read(arguments: argparse.Namespace, *, may_be_empty: bool = False) -> "tuple[bytes, Sequence[KnownPrincipal]]":
    from popgate.auth.key_file import FILE_BYTES_MAX, KeyFileError, parse_key_file
    from popgate.runtime.private_files import PrivateFileError, read_private

    file = _file(arguments)
    try:
        content = read_private(file, bytes_max=FILE_BYTES_MAX, as_administrator=True)
        return content, parse_key_file(content, may_be_empty=may_be_empty)
    except PrivateFileError as error:
        raise CommandFailed(str(error)) from error
    except KeyFileError as error:
        raise CommandFailed(_lines(f"{file} is wrong; edit it first:", error.problems)) from error


def _change(
    arguments: argparse.Namespace,
    change: "Callable[[bytes, Sequence[KnownPrincipal]], bytes]",
    *,
    may_create: bool = False,
) -> None:
    """Let ``change`` return the new content of the file, and write it, while no other command changes it.

    If it ``may_create`` principals, the file may be missing or without principals. Raises: CommandFailed.
    """
    from popgate.auth.key_file import FILE_BYTES_MAX, KeyFileError
    from popgate.runtime.private_files import PrivateFileError, locked_private, replace_private

    file = _file(arguments)
    try:
        with locked_private(file):
            is_new = may_create and not file.exists()
            content, known = (b"", ()) if is_new else _read(arguments, may_be_empty=may_create)
            changed = change(content, known)
            if changed != content:
                replace_private(file, changed, bytes_max=FILE_BYTES_MAX)
    except PrivateFileError as error:
        raise CommandFailed(str(error)) from error
    except KeyFileError as error:
        raise CommandFailed(_lines(f"{file} is not changed:", error.problems)) from error
    if is_new:
        note(arguments, f"created {file}; start the proxies with --keys-file {file}")


def _lines(first: str, problems: Sequence[str]) -> str:
    return "\n".join([first, *(f"  {problem}" for problem in problems)])


def _require(arguments: argparse.Namespace, name: str, known: "Sequence[KnownPrincipal]") -> None:
    if all(one.principal.name != name for one in known):
        raise CommandFailed(f"{_file(arguments)} has no principal {name!r}; see: popgate keys list")


# -- keys -------------------------------------------------------------------------------------------------------------


def _new_key(arguments: argparse.Namespace) -> "KeyToAdd":
    """Return a key that can be printed later. Raises: CommandFailed."""
    from popgate.auth.key_file_edits import KeyToAdd
    from popgate.auth.keys import new_key

    if sys.__stdout__ is None:  # the shell has closed it, and `commands` has replaced it by a null device
        raise CommandFailed("standard output is closed, so the key can't be printed; nothing was changed")
    now = float(int(time.time()))
    expires = None if arguments.expires is None else now + arguments.expires
    return KeyToAdd(new_key(), now, expires, arguments.note)


def _print_key(arguments: argparse.Namespace, name: str, new: "KeyToAdd") -> int:
    from popgate.auth.key_file import shown_time

    expires = None if new.expires is None else shown_time(new.expires)
    row = {"principal": name, "id": new.key.id, "key": new.key.text, "expires": expires}
    try:
        if "output" in arguments:
            Printer(ADDED_COLUMNS, output_of(arguments)).print([row])
        else:
            print(new.key.text, flush=True)
    except OSError:
        complain(f"the key could not be printed; revoke it with: popgate keys revoke {new.key.id}")
        raise
    note(arguments, f"added the key {new.key.id} of {name}; running proxies read the file within a second")
    return ExitCode.OK


def _id_of(text: str) -> str:
    """Return the id of a key. ``text`` may also be the whole key, which is then not shown in errors."""
    from popgate.auth.keys import key_id_in

    return key_id_in(text) or text


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or not text.isprintable():
        raise argparse.ArgumentTypeError(f"must be names or patterns with commas between them, not {text!r}")
    return names


def _note(text: str) -> str:
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError("must be printable characters")
    if without_credentials(text) != text:
        raise argparse.ArgumentTypeError(
            "must contain no key and no token, because the file and 'popgate keys list' show it"
        )
    return text


def _duration(minimum: int) -> Callable[[str], int]:
    """Return a function that parses a time such as ``90d``. The result is in seconds."""
    units = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}

    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,10})([smhdw])", text)
        seconds = int(match[1]) * units[match[2]] if match is not None else -1
        if not minimum <= seconds <= DURATION_SECONDS_MAX:
            raise argparse.ArgumentTypeError(f"must be a number with s, m, h, d or w, such as 90d, not {text!r}")
        return seconds

    return parse
