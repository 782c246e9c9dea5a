"""Marks a data folder while a backup is restored into it. popgate does not start on a folder with this mark."""

from pathlib import Path

from popgate.domain.errors import StartupError

RESTORING_FILE = "popgate.restoring"


def check_restored(folder: Path) -> None:
    """Raises: StartupError if a restore into the folder has not ended."""
    if (folder / RESTORING_FILE).exists():
        raise StartupError(
            f"a backup is being restored into the data folder {folder}, or a restore was interrupted: run "
            "'popgate restore' again, or choose another folder with --data-dir"
        )
