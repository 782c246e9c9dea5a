"""Defines ``popgate backup`` and ``popgate restore``, which copy the data folder of a proxy, and put the copy back."""

import argparse
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from popgate.backup.manifest import Manifest
from popgate.cli.backup_files import BackupDraft, copy_stopped_folder, read_archive
from popgate.cli.backup_source import RunningProxy
from popgate.cli.connecting import open_client, url_of
from popgate.cli.endings import CommandFailed, ExitCode, Terminated
from popgate.cli.flags import Commands, add_command, add_output_flags, add_plain_command
from popgate.cli.printing import complain, is_quiet, json_line, wants_table
from popgate.cli.progress import Progress
from popgate.cli.restoring import checked_manifest, restore
from popgate.config.options import SETTINGS
from popgate.domain.errors import StartupError
from popgate_client import PopgateError, token_in

EPILOG = """\
Takes a backup of the data folder of a running proxy, over HTTP, and writes it to FOLDER, which must be new or empty.
The proxy serves its clients meanwhile. The backup is the state of one moment, near the end of the command. It contains
all messages of an embedded proxy, and the secret of the data folder: keep it as private as the data folder.

On RabbitMQ, the messages are in RabbitMQ, and the backup contains the topics, groups, leases, locks and dedup ids. With
Redis, back up Redis instead. The journal, and the files of keys, secrets, settings and TLS, are not part of a backup.

--data-dir copies the data folder of a stopped proxy instead. What a restore means for messages: docs/backup.md.

examples:
  popgate backup /backups/2026-11-27
  popgate backup /backups/2026-11-27 --url https://popgate:8080 --token-file administrator-key
  popgate backup /backups/before-the-move --data-dir /var/lib/popgate
"""
RESTORE_EPILOG = """\
Checks the backup, and copies it to the data folder, which must be new or empty, and which no proxy uses. BACKUP is a
folder of 'popgate backup', or a tar archive of GET /v1/admin/backup/archive. Then start the proxy with this --data-dir.

Fencing tokens of locks continue above all that were given out before. Messages that were acked after the backup was
taken may be delivered again, and messages that were published after it are lost if they were in this data folder:
docs/backup.md has the details, also for RabbitMQ.

examples:
  popgate restore /backups/2026-11-27 --check
  popgate restore /backups/2026-11-27 --data-dir /var/lib/popgate
"""
_DATA_DIR = next(setting for setting in SETTINGS if setting.name == "data_dir")


def add_parsers(commands: Commands) -> None:
    parser = add_command(commands, "backup", backup, help="copy a proxy's data folder while it runs", epilog=EPILOG)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new folder for the backup")
    parser.add_argument("--data-dir", type=Path, metavar="FOLDER", help="the data folder of a stopped proxy")
    parser = add_plain_command(commands, "restore", "put a backup into a new data folder", RESTORE_EPILOG)
    parser.add_argument("backup", metavar="BACKUP", type=Path, help="folder of a backup, or a tar archive")
    parser.add_argument("--check", action="store_true", help="only check the backup")
    parser.add_argument(
        "--data-dir",
        metavar="FOLDER",
        help=f"data folder to restore (POPGATE_DATA_DIR; default: {_DATA_DIR.shown_default()})",
    )
    add_output_flags(parser)
    parser.set_defaults(run=restore_backup)


def backup(arguments: argparse.Namespace) -> int:
    """Take a backup. If the command fails or is interrupted, nothing remains. Raises: CommandFailed."""
    progress = Progress(sys.stderr, shown=None)
    with _ended_by_sigterm(), BackupDraft(arguments.folder) as draft:
        if arguments.data_dir is not None:
            manifest = copy_stopped_folder(arguments.data_dir, draft.folder, progress)
        else:
            manifest = _from_proxy(arguments, draft, progress)
        draft.finish(manifest)
    progress.clear()
    _report("backed up to", arguments.folder, manifest, arguments)
    return ExitCode.OK


def _from_proxy(arguments: argparse.Namespace, draft: BackupDraft, progress: Progress) -> Manifest:
    file: str | None = getattr(arguments, "token_file", None)
    with open_client(arguments) as client:
        source = RunningProxy(client, url_of(arguments), None if file is None else token_in(file))
        try:
            source.take(progress)
            with source.archive() as stream:
                return read_archive(stream, draft.folder, progress)
        finally:
            with suppress(PopgateError):  # the proxy deletes it later
                source.delete()


def restore_backup(arguments: argparse.Namespace) -> int:
    """Restore a backup, or check it. Raises: CommandFailed."""
    progress = Progress(sys.stderr, shown=None)
    with _ended_by_sigterm():
        if arguments.check:
            manifest = checked_manifest(arguments.backup, progress)
            progress.clear()
            _report("whole:", arguments.backup, manifest, arguments)
            return ExitCode.OK
        folder = _data_folder(arguments)
        try:
            manifest = restore(arguments.backup, folder, progress)
        except StartupError as error:
            raise CommandFailed(error.detail) from error
    progress.clear()
    _report("restored to", folder, manifest, arguments)
    return ExitCode.OK


def _data_folder(arguments: argparse.Namespace) -> Path:
    from popgate import config

    given: str | None = arguments.data_dir or config.environment().get(_DATA_DIR.variable)
    if given is None:
        assert isinstance(_DATA_DIR.default, Path), "it is a folder"
        return _DATA_DIR.default
    try:
        folder = _DATA_DIR.parse(given)
    except ValueError as error:
        raise CommandFailed(f"--data-dir: {error}", ExitCode.USAGE) from error
    assert isinstance(folder, Path), "it is a folder"
    return folder


def _report(what: str, place: Path, manifest: Manifest, arguments: argparse.Namespace) -> None:
    if is_quiet(arguments):
        return
    size = sum(one.bytes for one in manifest.files)
    if not wants_table(arguments):
        row = {"place": str(place), "bytes": size, "taken_at": manifest.taken_at}
        print(json_line({**row, "popgate": manifest.popgate, "schema": manifest.schema, "broker": manifest.broker}))
        return
    taken = datetime.fromtimestamp(manifest.taken_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    complain(f"{what} {place}: {size:,} bytes, taken at {taken} by popgate {manifest.popgate}")


@contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """Within the context, SIGTERM raises Terminated, so that what is unfinished is deleted."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
