"""Builds what takes backups of the data folder."""

from popgate import __version__
from popgate.backup.hosted import HostedBackup
from popgate.bootstrap.state import State
from popgate.config import ServeOptions
from popgate.ports.clock import Clock
from popgate.runtime.background import Background
from popgate.runtime.data_folder import bound_broker


def hosted_backup(options: ServeOptions, state: State, clock: Clock, background: Background) -> HostedBackup:
    """Return what takes backups of the data folder, which must be bound to its broker already.

    Raises: StartupError.
    """
    broker = "" if state.snapshots is None else bound_broker(options.data_dir)
    assert broker is not None, "the proxy has recorded its broker"
    return HostedBackup(options.data_dir, state.snapshots, broker, __version__, clock, background)
