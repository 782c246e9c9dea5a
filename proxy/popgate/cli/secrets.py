"""Defines ``popgate secrets``, which creates the file of secrets that the proxies of a cluster share, and changes it.

The commands change a file only. A proxy reads the file when it starts.
"""

import argparse
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from popgate.cli.endings import CommandFailed
from popgate.cli.flags import Commands, add_output_flags, add_plain_command
from popgate.cli.printing import Column, field, note, print_list
from popgate.config.security_values import SECRETS_MAX, secrets_in
from popgate.domain.derived_keys import key_id
from popgate.runtime.private_files import PrivateFileError, locked_private, read_private, replace_private

SECRET_BYTES = 32
EPILOG = """\
The proxies of a cluster share the secrets in this file (popgate serve --secret-file FILE). The first one signs receipt
handles, identity tags of messages and the proxies' certificates; all of them are accepted. A proxy reads the file when
it starts, and every proxy needs the same file: change one, and copy it to the others.

To replace the secret while clients work:

  1. popgate secrets add FILE        copy FILE to each proxy, and restart the proxies one after the other:
                                     all of them know the new secret
  2. popgate secrets promote FILE    copy FILE, and restart the proxies one after the other: the new secret signs
  3. wait                            until the longest lease has ended, and the messages that were published before
                                     step 2 are consumed, also dead letters and delayed messages
  4. popgate secrets drop FILE       copy FILE, and restart the proxies one after the other: the old secret is unknown

No receipt handle becomes invalid meanwhile. Start a step only when every proxy has been restarted. If a secret may be
known to others, do steps 1, 2 and 4 at once: older handles become invalid, and older messages lose their identity.

examples:
  popgate secrets new /etc/popgate/secret
  popgate secrets list /etc/popgate/secret
"""
NEW_EPILOG = """\
examples:
  popgate secrets new /etc/popgate/secret
"""
ADD_EPILOG = """\
The new secret is the last one: proxies accept it, but don't sign with it yet.

examples:
  popgate secrets add /etc/popgate/secret
"""
PROMOTE_EPILOG = """\
Every proxy must have been restarted since 'popgate secrets add'.

examples:
  popgate secrets promote /etc/popgate/secret
"""
DROP_EPILOG = """\
Receipt handles that this secret signed become invalid, and messages that were published with it lose their identity.

examples:
  popgate secrets drop /etc/popgate/secret
"""
LIST_EPILOG = """\
The ids are public: receipt handles and identity tags contain them.

examples:
  popgate secrets list /etc/popgate/secret
"""
COLUMNS = (
    Column("ID", field("id")),
    Column("USE", lambda row: "signs, and is accepted" if row["signs"] else "is accepted"),
)


def add_parser(commands: Commands) -> None:
    parser = add_plain_command(
        commands, "secrets", "create and change the secrets that the proxies of a cluster share", EPILOG
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, help, epilog in (
        ("new", new, "create the file with one secret", NEW_EPILOG),
        ("add", add, "append a new secret", ADD_EPILOG),
        ("promote", promote, "make the last secret the first, so that it signs", PROMOTE_EPILOG),
        ("drop", drop, "remove the last secret", DROP_EPILOG),
        ("list", show, "show the ids of the secrets, and which one signs", LIST_EPILOG),
    ):
        action = add_plain_command(actions, name, help, epilog)
        action.add_argument("file", metavar="FILE", type=Path, help="file of secrets, one in each line")
        add_output_flags(action)
        action.set_defaults(run=run)


def new(arguments: argparse.Namespace) -> int:
    """Create the file. Raises: CommandFailed, also if it exists."""
    file, secret = arguments.file, _new_secret()
    try:
        with locked_private(file):
            if file.exists():
                raise CommandFailed(f"{file} exists; append a secret with 'popgate secrets add', or name another file")
            replace_private(file, secret + b"\n")
    except PrivateFileError as error:
        raise CommandFailed(str(error)) from error
    note(arguments, f"{file} has the secret {_shown(secret)}")
    return 0


def add(arguments: argparse.Namespace) -> int:
    def change(lines: list[bytes], known: Sequence[bytes]) -> str:
        if len(known) >= SECRETS_MAX:
            raise CommandFailed(f"{arguments.file} has {SECRETS_MAX} secrets already; drop one first")
        lines.append(_new_secret())
        return f"appended {_shown(lines[-1])}; {_shown(known[0])} still signs"

    return _change(arguments, change)


def promote(arguments: argparse.Namespace) -> int:
    def change(lines: list[bytes], known: Sequence[bytes]) -> str:
        if len(known) == 1:
            raise CommandFailed(f"{arguments.file} has only one secret, which signs already; add one first")
        lines.remove(known[-1])
        lines.insert(lines.index(known[0]), known[-1])
        return f"{_shown(known[-1])} signs now"

    return _change(arguments, change)


def drop(arguments: argparse.Namespace) -> int:
    def change(lines: list[bytes], known: Sequence[bytes]) -> str:
        if len(known) == 1:
            raise CommandFailed(f"{arguments.file} has only one secret, and a proxy needs it; add one first")
        lines.remove(known[-1])
        return f"dropped {_shown(known[-1])}; {_shown(known[0])} signs"

    return _change(arguments, change)


def show(arguments: argparse.Namespace) -> int:
    _, known = _read(arguments.file)
    rows = [{"id": _shown(secret), "signs": secret == known[0]} for secret in known]
    print_list(arguments, COLUMNS, rows)
    return 0


def _change(arguments: argparse.Namespace, change: Callable[[list[bytes], Sequence[bytes]], str]) -> int:
    """Let ``change`` modify the lines of a file, given its secrets. Replace the file, and print what has changed.

    Comments stay. Raises: CommandFailed.
    """
    file: Path = arguments.file
    try:
        with locked_private(file):
            content, known = _read(file)
            lines = [line.strip() for line in content.splitlines()]
            done = change(lines, known)
            replace_private(file, b"\n".join([*lines, b""]))
    except PrivateFileError as error:
        raise CommandFailed(str(error)) from error
    note(arguments, done)
    return 0


def _read(file: Path) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the content of a file, and its secrets. Raises: CommandFailed."""
    try:
        content = read_private(file, as_administrator=True)
    except PrivateFileError as error:
        raise CommandFailed(str(error)) from error
    try:
        return content, secrets_in(content)
    except ValueError as error:
        raise CommandFailed(f"{file}: {error}") from error


def _new_secret() -> bytes:
    return secrets.token_hex(SECRET_BYTES).encode()


def _shown(secret: bytes) -> str:
    return key_id(secret).hex()
