"""Defines ``popgate locks``, which lists and administers locks. Its command ``acquire`` runs another command while it
holds a lock."""

import argparse
import logging
import time

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Command, Commands, Parser, add_command, number, seconds
from popgate.cli.guarded import GuardedCommand
from popgate.cli.printing import (
    Column,
    JsonObject,
    Output,
    Printer,
    duration,
    field,
    is_quiet,
    note,
    output_of,
    print_change,
    print_list,
    visible,
)
from popgate_client import LockLost, LockNotAcquired

TTL_SECONDS_MAX = 43_200.0
SLOTS_MAX = 64

EPILOG = """\
examples:
  popgate locks
  popgate locks list -o name
  popgate locks acquire nightly --wait-seconds 60 --exec ./report.sh --all
  popgate locks show nightly
  popgate locks set licences --kind semaphore --slots 4
"""
SET_EPILOG = """\
Creates a lock, or changes it; settings that are not named stay as they are. A new lock needs --kind, which can't be
changed later, and is enabled with one slot. If a held slot is removed, its holder learns it at the next renewal.

examples:
  popgate locks set nightly --kind mutex
  popgate locks set licences --kind semaphore --slots 4
  popgate locks set licences --slots 2
  popgate locks set licences --disabled
"""
ACQUIRE_EPILOG = """\
Runs the command while the lock is held, and renews the lock meanwhile. Everything after --exec belongs to the command.
The command finds the lock's name in POPGATE_LOCK, and in POPGATE_FENCING_TOKEN the fencing token for the protected
resource.
Ctrl-C, SIGTERM, SIGHUP and SIGQUIT are passed to the command, and the lock is released when the command ends. Without a
terminal, the command gets its own process group, and signals go to all processes that it has started.

If the lock is lost (the proxy was killed, an operator has released it, this machine was paused), the command gets
SIGTERM, and SIGKILL after --grace-seconds. If popgate itself is killed with SIGKILL, the command keeps running, so the
protected resource should check the fencing tokens.

Exit codes: the command's own, or 128 + N if signal N has ended it; 75 others hold the lock, and the command was not
run; 76 the lock was lost; 126 the command can't be run; 127 it was not found; 1, 2, 3 as for other commands.

examples:
  popgate locks acquire nightly --exec ./report.sh --all
  popgate locks acquire nightly --wait-seconds 600 --ttl-seconds 10 --exec sh -c 'echo "$POPGATE_FENCING_TOKEN"'
"""
RELEASE_EPILOG = """\
For operators: takes a lock away from a holder that hangs. The holder learns it at its next renewal, and may continue
until then.

examples:
  popgate locks release nightly --all
  popgate locks release licences --holder billing-7
  popgate locks release licences --fencing-token 1864370000000000
"""
DELETE_EPILOG = """\
examples:
  popgate locks delete nightly
  popgate locks delete licences --yes
"""


def _held(row: JsonObject) -> str:
    return str(len(row["holders"]))


def _since(row: JsonObject) -> str:
    return "-" if row["acquired_at"] is None else duration(max(0.0, time.time() - row["acquired_at"]))


def _remaining(row: JsonObject) -> str:
    return "-" if row["expires_at"] is None else duration(max(0.0, row["expires_at"] - time.time()))


COLUMNS = (
    Column("LOCK", field("name")),
    Column("KIND", field("kind")),
    Column("SLOTS", field("slots")),
    Column("ENABLED", lambda row: "yes" if row["enabled"] else "no"),
    Column("HELD", _held),
    Column("WAITING", field("waiting")),
)
HOLDER_COLUMNS = (
    Column("HOLDER", field("holder")),
    Column("SLOT", field("slot")),
    Column("FENCING TOKEN", field("fencing_token")),
    Column("HELD FOR", _since),
    Column("REMAINING", _remaining),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "locks", list_locks, help="run a command under a lock; list and administer locks", epilog=EPILOG
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    add_command(actions, "list", list_locks, help="list all locks (also without an action)", epilog=EPILOG)
    _of_lock(actions, "show", show_lock, help="show a lock and its holders", epilog=EPILOG)
    _add_set(actions)
    _add_acquire(actions)
    release = _of_lock(
        actions, "release", release_lock, help="take a lock away from its holders", epilog=RELEASE_EPILOG
    )
    release.add_argument("--holder", metavar="NAME", help="from this holder")
    release.add_argument("--fencing-token", type=number(0), metavar="N", help="from the holder with this fencing token")
    release.add_argument("--all", action="store_true", help="from all holders")
    delete = _of_lock(actions, "delete", delete_lock, help="delete a lock", epilog=DELETE_EPILOG)
    delete.add_argument("--yes", action="store_true", help="even if it is held; its holders lose it")


def _of_lock(actions: Commands, name: str, run: Command, *, help: str, epilog: str) -> Parser:
    parser = add_command(actions, name, run, help=help, epilog=epilog)
    parser.add_argument("name", metavar="NAME")
    return parser


def _add_set(actions: Commands) -> None:
    parser = _of_lock(actions, "set", set_lock, help="create or change a lock", epilog=SET_EPILOG)
    parser.add_argument("--kind", choices=("mutex", "persistent_mutex", "semaphore"), help="kind of a new lock")
    parser.add_argument("--slots", type=number(0, SLOTS_MAX), metavar="N", help="number of holders")
    enabled = parser.add_mutually_exclusive_group()
    enabled.add_argument("--enabled", action="store_true", default=None, help="the lock can be acquired")
    enabled.add_argument(
        "--disabled", dest="enabled", action="store_false", help="the lock can't be acquired, and its holders lose it"
    )


def _add_acquire(actions: Commands) -> None:
    parser = _of_lock(actions, "acquire", acquire, help="run a command while a lock is held", epilog=ACQUIRE_EPILOG)
    parser.add_argument(
        "--ttl-seconds",
        type=seconds(1, TTL_SECONDS_MAX),
        default=30.0,
        metavar="SECONDS",
        help="the lock is released this long after popgate disappears; renewed after a third of it (default: 30)",
    )
    parser.add_argument(
        "--wait-seconds",
        type=seconds(0),
        default=0.0,
        metavar="SECONDS",
        help="how long to wait if others hold the lock (default: 0)",
    )
    parser.add_argument("--holder", metavar="NAME", help="name of the holder, for people (default: machine:process)")
    parser.add_argument(
        "--grace-seconds",
        type=seconds(0),
        default=10.0,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL if the lock is lost (default: 10)",
    )
    parser.add_argument(
        "--exec",
        dest="command",
        nargs=argparse.REMAINDER,
        required=True,
        metavar="COMMAND",
        help="the command to run; takes all following arguments",
    )


def list_locks(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        locks = client.locks()
    print_list(
        arguments, COLUMNS, locks, nothing="no locks; an acquire creates one, or: popgate locks set NAME --kind mutex"
    )
    return ExitCode.OK


def show_lock(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        _print(client.get_lock(arguments.name), output_of(arguments))
    return ExitCode.OK


def set_lock(arguments: argparse.Namespace) -> int:
    """Create or change a lock. Without --kind, the lock must exist, and keeps its kind. Raises: LockNotFound."""
    with open_client(arguments) as client:
        kind = arguments.kind or client.get_lock(arguments.name)["kind"]
        lock = client.put_lock(arguments.name, kind, arguments.slots, arguments.enabled)
    if not is_quiet(arguments):
        _print(lock, output_of(arguments))
    return ExitCode.OK


def acquire(arguments: argparse.Namespace) -> int:
    """Acquire a lock, run the given command while the lock is held, and return the command's exit code.

    Raises: CommandFailed if the lock was not acquired, or was lost.
    """
    if not arguments.command:
        raise CommandFailed("--exec needs a command", ExitCode.USAGE)
    # The client's log lines about retries must not mix with the command's output.
    logging.getLogger("popgate_client").addHandler(logging.NullHandler())
    guarded = GuardedCommand(arguments.command, grace_seconds=arguments.grace_seconds)
    try:
        with (
            guarded.signals(),
            open_client(arguments) as client,
            client.lock(
                arguments.name,
                holder=arguments.holder,
                ttl_seconds=arguments.ttl_seconds,
                wait_seconds=arguments.wait_seconds,
                on_loss=lambda _: guarded.end(),
            ) as lock,
        ):
            return guarded.run({"POPGATE_LOCK": lock.name, "POPGATE_FENCING_TOKEN": str(lock.fencing_token)})
    except LockNotAcquired as error:
        raise CommandFailed(f"{error.detail}; the command was not run", ExitCode.LOCK_NOT_ACQUIRED) from error
    except LockLost as error:
        line = f"lost lock {arguments.name}, and the command was ended: {error.detail}"
        raise CommandFailed(" ".join(line.split()), ExitCode.LOCK_LOST) from error


def release_lock(arguments: argparse.Namespace) -> int:
    some = arguments.holder is not None or arguments.fencing_token is not None
    if some == arguments.all:
        raise CommandFailed("name the holders: --holder, --fencing-token, or --all", ExitCode.USAGE)
    with open_client(arguments) as client:
        released = client.force_release(arguments.name, holder=arguments.holder, fencing_token=arguments.fencing_token)
    print_change(arguments, HOLDER_COLUMNS, released)
    if not released:
        note(arguments, f"lock {arguments.name} was not held{' by that holder' if some else ''}")
    return ExitCode.OK


def delete_lock(arguments: argparse.Namespace) -> int:
    with open_client(arguments) as client:
        if not arguments.yes and (holders := client.get_lock(arguments.name)["holders"]):
            line = f"lock {arguments.name} is held by {visible(holders[0]['holder'])}; confirm with --yes"
            raise CommandFailed(line, ExitCode.USAGE)
        client.delete_lock(arguments.name)
    note(arguments, f"deleted {arguments.name}")
    return ExitCode.OK


def _print(lock: JsonObject, output: Output) -> None:
    """Print the lock as one JSON line, or as two tables: the lock, and its holders if there are any."""
    Printer(COLUMNS, output).print([lock])
    if output.is_table and lock["holders"]:
        print()
        Printer(HOLDER_COLUMNS, output).print(lock["holders"])
