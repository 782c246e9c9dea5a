"""Defines ``popgate replicas``, which shows the present and wanted replicas of quorum queues and streams, and runs the
replica keeper."""

import argparse
import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from popgate.cli.configured import options_of
from popgate.cli.endings import CommandFailed, ExitCode, Terminated
from popgate.cli.flags import TOKEN_FILE_HELP, Command, Commands, Parser, add_output_flags, add_plain_command
from popgate.cli.former_flags import add_former
from popgate.cli.printing import Column, JsonObject, complain, duration, field, note, print_list, visible
from popgate.cli.serve import add_setting
from popgate.config.options import REPLICA_SETTINGS, SETTINGS
from popgate.config.setting import Setting
from popgate.domain.hosts import is_loopback
from popgate_client import RequestInvalid, token_in
from popgate_client.tokens import current_token, token_of_environment

if TYPE_CHECKING:
    from popgate.config import ServeOptions
    from popgate.ports.replicas import ReplicaCapabilities
    from popgate.replicas.keeper import ReplicaKeeper
    from popgate.replicas.survey import Survey

T = TypeVar("T")

OWN_SETTINGS = ("amqp_url", "amqp_url_file", "amqp_heartbeat_seconds", "consumer_timeout_seconds", "log_level")
EPILOG = """\
Talks to RabbitMQ directly, not through a proxy. For each queue it shows the number of members, of online members, and
of wanted members with the source of that number: the queue's argument (x-popgate-min-replicas, or
x-quorum-target-group-size), else the min_replicas of its popgate group, else the most specific of --policies, else
RabbitMQ's own policy (target-group-size), else --min-replicas. Only proxies know the groups: name a proxy with
--groups-url, or the groups' min_replicas are ignored.

Queues are read through the management API, else with rabbitmqctl. They are changed through the management API if it
supports that (RabbitMQ 3.11.19, 3.12.1 and newer, quorum queues), else with rabbitmq-queues and rabbitmq-streams, on
this machine or as --commands says.

examples:
  popgate replicas status --amqp-url amqp://guest:guest@rabbit-1/
  popgate replicas plan --amqp-url amqp://guest:guest@rabbit-1/ --policies 'orders*=5, audit*=3'
  popgate replicas apply --amqp-url amqp://guest:guest@rabbit-1/ --commands 'ssh rabbit-1, ssh rabbit-2'
  popgate replicas watch --amqp-url amqp://guest:guest@rabbit-1/,amqp://guest:guest@rabbit-2/
"""
STATUS_EPILOG = """\
Shows all queues, or with --show nodes the nodes, and on standard error which keeper is active.

examples:
  popgate replicas status --amqp-url amqp://guest:guest@rabbit-1/
  popgate replicas status --show nodes --zones 'rabbit@one=a, rabbit@two=b'
"""
PLAN_EPILOG = """\
Shows what 'apply' would do now, and why, and which queues lack replicas although nothing can be done. Changes nothing.
A keeper ('watch') also waits until a queue has lacked replicas for --recovery-interval-seconds.

examples:
  popgate replicas plan --amqp-url amqp://guest:guest@rabbit-1/
  popgate replicas plan --min-replicas 0 --policies 'orders*=5'
"""
APPLY_EPILOG = """\
Makes the changes that 'plan' shows, a few queues at a time, waits until new replicas have caught up, and ends when
no more changes are possible. It starts at once, without the keeper's delay, and refuses to run while a keeper is
active.

Exit codes: 0 all queues have the wanted replicas, 1 some don't (they are shown), 2, 3 as for other commands.

examples:
  popgate replicas apply --amqp-url amqp://guest:guest@rabbit-1/
  popgate replicas apply --allow-stall
"""
WATCH_EPILOG = """\
Runs the keeper until Ctrl-C or SIGTERM. Start as many as you like: one is active, and another one takes over if it
fails. Its log shows each decision. With popgate serve --replica-keeper the proxies run the keeper.

examples:
  popgate replicas watch --amqp-url amqp://guest:guest@rabbit-1/,amqp://guest:guest@rabbit-2/
  popgate replicas watch --recovery-interval-seconds 300 --forget-after-seconds 86400
  popgate replicas watch --groups-url http://proxy-1:8080,http://proxy-2:8080
"""


def _count(name: str) -> Callable[[JsonObject], str]:
    return lambda row: str(len(row[name]))


COLUMNS = (
    Column("QUEUE", field("queue")),
    Column("KIND", field("kind")),
    Column("MEMBERS", _count("members")),
    Column("ONLINE", _count("online")),
    Column("WANTED", field("wanted")),
    Column("FROM", field("source")),
    Column("STATE", field("verdict")),
    Column("CHANGE", lambda row: "-" if row["change"] is None else f"{row['change']['kind']} {row['change']['node']}"),
    Column("WHY", field("reason")),
)
NODE_COLUMNS = (
    Column("NODE", field("node")),
    Column("ZONE", field("zone")),
    Column("TAKES REPLICAS", lambda row: "yes" if row["unfit_reason"] is None else f"no: {row['unfit_reason']}"),
    Column("REPLICAS", field("replicas")),
)


def add_parser(commands: Commands) -> None:
    help_text = "show, plan and maintain the replicas of RabbitMQ's queues"
    parser = add_plain_command(commands, "replicas", help_text, EPILOG)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    status = _action(actions, "status", status_of, "show the present and wanted replicas of each queue", STATUS_EPILOG)
    status.add_argument(
        "--show", choices=("queues", "nodes"), default="queues", help="what the rows are (default: queues)"
    )
    add_former(status, "--nodes", "--show nodes", value="nodes")
    _action(actions, "plan", plan, "show the planned changes and their reasons", PLAN_EPILOG)
    _action(actions, "apply", apply, "make the planned changes now, once", APPLY_EPILOG)
    _action(actions, "watch", watch, "maintain the replicas until it is stopped", WATCH_EPILOG)


def _action(actions: Commands, name: str, run: Command, help: str, epilog: str) -> Parser:
    parser = add_plain_command(actions, name, help, epilog)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (POPGATE_CONFIG)")
    for setting in _settings():
        add_setting(parser, _flag(setting), setting)
        if _flag(setting) != setting.flag:  # errors name this flag, and users of popgate serve know it
            add_setting(parser, setting.flag, setting, hidden=True)
    parser.add_argument("--token-file", metavar="FILE", help=f"for --groups-url: {TOKEN_FILE_HELP}")
    if name != "watch":
        add_output_flags(parser)
    parser.set_defaults(run=run)
    return parser


def _settings() -> Sequence[Setting]:
    return [*(setting for setting in SETTINGS if setting.name in OWN_SETTINGS), *REPLICA_SETTINGS]


def _flag(setting: Setting) -> str:
    """Return the flag of a setting in this command: the flag of ``popgate serve`` without the prefix ``replica-``."""
    return "--" + setting.name.removeprefix("replica_").replace("_", "-")


def status_of(arguments: argparse.Namespace) -> int:
    from popgate.replicas.rows import node_rows, queue_rows

    survey = _run(arguments, partial(_status, arguments))
    if arguments.show == "nodes":
        print_list(arguments, NODE_COLUMNS, node_rows(survey.seen), nothing="no nodes")
    else:
        print_list(arguments, COLUMNS, queue_rows(survey.plan), nothing="no quorum queues or streams")
    return ExitCode.OK


def plan(arguments: argparse.Namespace) -> int:
    survey = _run(arguments, lambda keeper: keeper.survey())
    _print_unlike_wanted(survey, arguments)
    return ExitCode.OK


def apply(arguments: argparse.Namespace) -> int:
    survey = _run(arguments, lambda keeper: keeper.apply())
    return ExitCode.FAILED if _print_unlike_wanted(survey, arguments) else ExitCode.OK


def watch(arguments: argparse.Namespace) -> int:
    from popgate.runtime.logs import configure_logging

    async def keep(keeper: "ReplicaKeeper") -> None:
        capabilities = await keeper.capabilities()
        complain(f"keeping replicas on {_ways(capabilities, keeper)}")
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        running = asyncio.create_task(keeper.run(), name="popgate replica keeper")
        stopped = asyncio.create_task(stopping.wait(), name="wait for a signal")
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()

    options = options_of(arguments, _settings(), on_broker=True)
    configure_logging(options.log_level)
    # If RabbitMQ can't be reached, the adapter logs the reason in one line. Its library would log the reason again.
    logging.getLogger("aiormq.connection").setLevel(logging.CRITICAL)
    _run_with(options, _token(arguments), keep)
    return ExitCode.OK


async def _status(arguments: argparse.Namespace, keeper: "ReplicaKeeper") -> "Survey":
    survey, holder = await keeper.survey(), await keeper.at_work()
    capabilities = await keeper.capabilities()
    note(arguments, _ways(capabilities, keeper))
    if holder is None:
        note(arguments, "no keeper is active")
    else:
        since = "" if holder.since is None else f", for {duration(max(0.0, time.time() - holder.since))}"
        known = f"{visible(holder.holder) or 'unknown'} (fencing token {holder.fencing_token}){since}"
        note(arguments, f"the active keeper is {known}")
    return survey


def _ways(capabilities: "ReplicaCapabilities", keeper: "ReplicaKeeper") -> str:
    """Return a line that describes this RabbitMQ, and the interfaces through which popgate observes and changes it."""
    leaders = f", leaders are moved by {capabilities.moves_leaders_by or 'nothing'}"
    return (
        f"RabbitMQ {capabilities.version}, seen by {capabilities.sees_by}; quorum queues are changed by "
        f"{capabilities.changes_quorum_by or 'nothing'}, streams by "
        f"{capabilities.changes_streams_by or 'nothing'}{leaders if keeper.options.limits.move_leaders else ''}"
    )


def _print_unlike_wanted(survey: "Survey", arguments: argparse.Namespace) -> int:
    """Print the queues whose replicas differ from the wanted replicas, and return the number of these queues."""
    from popgate.replicas.rows import queue_rows

    rows = [row for row in queue_rows(survey.plan) if row["verdict"] != "enough"]
    print_list(arguments, COLUMNS, rows, nothing="nothing to change")
    note(arguments, f"{len(survey.plan.rows) - len(rows)} of {len(survey.plan.rows)} queues have the wanted replicas")
    return len(rows)


def _run(arguments: argparse.Namespace, work: "Callable[[ReplicaKeeper], Coroutine[Any, Any, Survey]]") -> "Survey":
    from popgate.runtime.logs import configure_logging

    configure_logging("error" if arguments.log_level is None else arguments.log_level)
    logging.getLogger("aiormq.connection").setLevel(logging.CRITICAL)
    return _run_with(options_of(arguments, _settings(), on_broker=True), _token(arguments), work)


def _token(arguments: argparse.Namespace) -> Callable[[], str] | None:
    """Return a function that returns the token for ``--groups-url``; None if there is none. The function raises
    PeerUnavailable if the token can't be sent, so that a running keeper repeats the request later."""
    from popgate.domain.errors import PeerUnavailable

    source = token_of_environment() if arguments.token_file is None else token_in(arguments.token_file)
    if source == "":
        return None

    def token() -> str:
        try:
            return current_token(source)
        except RequestInvalid as error:
            raise PeerUnavailable(error.detail) from error

    return token


def _warn_of_clear_text(urls: Sequence[str], *, has_token: bool) -> None:
    """Warn about each other machine that gets a token or a password over http, once."""
    hosts: dict[str, None] = {}
    for parts in map(urlsplit, urls):
        if parts.scheme == "http" and (has_token or parts.username is not None) and parts.hostname is not None:
            hosts[parts.hostname] = None
    for host in hosts:
        if not is_loopback(host):
            complain(f"--groups-url: the token or password for {host} is sent without encryption; use https")


def _run_with(
    options: "ServeOptions",
    token: Callable[[], str] | None,
    work: "Callable[[ReplicaKeeper], Coroutine[Any, Any, T]]",
) -> T:
    """Run ``work`` with a replica keeper, and return its result. Raises: CommandFailed."""
    from popgate.bootstrap import rabbit_options
    from popgate.bootstrap.replicas import proxy_groups, replica_keeper
    from popgate.domain.errors import BrokerUnavailable, LockUnavailable, PeerUnavailable, PopgateError, StartupError

    _warn_of_clear_text(options.replica_groups_urls, has_token=token is not None)
    rabbit = rabbit_options(options)

    async def working() -> T:
        this = asyncio.current_task()
        assert this is not None, "asyncio.run runs it"
        # SIGTERM acts like Ctrl-C: running tools are stopped, and the lock is released.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        async with proxy_groups(options, rabbit, token) as groups, replica_keeper(options, rabbit, groups) as keeper:
            return await work(keeper)

    try:
        return asyncio.run(working())
    except asyncio.CancelledError as error:
        raise Terminated from error
    except (BrokerUnavailable, LockUnavailable, PeerUnavailable, StartupError) as error:
        raise CommandFailed(error.detail, ExitCode.UNREACHABLE) from error
    except PopgateError as error:
        raise CommandFailed(error.detail) from error
