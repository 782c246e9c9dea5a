"""Defines ``popgate prove``, which uses a lock implementation, injects faults into the holders of locks, and checks the
implementation's guarantees."""

import argparse
import asyncio
import json
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from popgate import config
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import Commands, Parser, add_output_flags, number, seconds
from popgate.cli.former_flags import add_former
from popgate.cli.printing import Output, complain, is_quiet, json_line, output_of
from popgate.cli.progress import Progress
from popgate.config.values import amqp_urls
from popgate_client.tokens import bearer_auth
from popgate_client.transport import url_complaint

if TYPE_CHECKING:
    from popgate.prover.nodes import Nodes
    from popgate.prover.report import KindReport, Report
    from popgate.prover.run import ProveOptions

KINDS = ("mutex", "persistent_mutex", "semaphore")
FAULTS = ("kill", "stop", "cut", "admin", "node")
DURATION_SECONDS = 60.0
SEED_MAX = 2**32
EPILOG = """\
Worker processes acquire, verify, write under and release one lock, while they are killed, stopped (SIGSTOP) and cut
off, slots are removed and added again, and nodes of the broker are killed. Then the history is checked: there are never
more holders than slots by the order of their tokens, tokens grow, waits end, removed slots are not granted, and no lock
is held after its release. A violation is shown as the smallest excerpt of the history. Ctrl-C ends the run early, with
a verdict on the results so far. docs/locks.md explains how to prove your own locks.

--http-url proves the locks that a proxy holds for HTTP clients; if it is given for several proxies, each request of a
client goes to a different one than the request before. A worker that is killed or stopped loses its lock after its time
to live (3 s).

The broker is RabbitMQ, without TLS; the prover's locks have their own names, and are removed in the end. --amqp-url may
be given for each node of a cluster, or once, with commas between the URLs. To kill nodes, give the commands, with
{node} for a node's number, from 1:

  --node-stop 'docker kill rabbit{node}' --node-start 'docker start rabbit{node} && ./wait-for rabbit{node}'

The same seed gives the same work and the same faults; their effects also depend on the machine.

Exit codes: 0 nothing found, 1 violations or nothing proven, 2 wrong usage, 3 the broker can't be reached, 130 Ctrl-C.

examples:
  popgate prove locks --amqp-url amqp://guest:guest@localhost/
  popgate prove locks --http-url http://127.0.0.1:8080 --http-url http://127.0.0.1:8081
  popgate prove locks --implementation my_locks:connect --kind mutex --duration-seconds 30 --report-file proof.json
"""
OWN_EPILOG = """\
examples:
  popgate prove locks --amqp-url amqp://guest:guest@localhost/
"""


def add_parser(commands: Commands) -> None:
    help_text = "prove that locks keep their guarantees"
    parser = commands.add_parser(
        "prove",
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=OWN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    locks = actions.add_parser(
        "locks",
        help="prove an implementation of locks",
        description="Prove an implementation of locks, popgate's own by default, on a real broker.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_flags(locks)
    locks.set_defaults(run=prove_locks)


def _add_flags(parser: Parser) -> None:
    parser.add_argument(
        "--implementation",
        metavar="MODULE:FUNCTION",
        help="function that makes a client of the lock (default: popgate's locks)",
    )
    parser.add_argument(
        "--amqp-url", action="append", metavar="URL", help="the broker, or each of its nodes (POPGATE_AMQP_URL)"
    )
    parser.add_argument(
        "--http-url", action="append", metavar="URL", help="a proxy, or each of several: prove locks over HTTP"
    )
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="only these kinds, one after the other (default: all)"
    )
    parser.add_argument("--seed", type=number(0, SEED_MAX), metavar="N", help="replay this seed (default: a new one)")
    parser.add_argument(
        "--duration-seconds",
        type=seconds(1, 86_400),
        default=DURATION_SECONDS,
        metavar="SECONDS",
        help=f"how long to inject faults, for all kinds together (default: {DURATION_SECONDS:g})",
    )
    parser.add_argument("--slots", type=number(1, 16), default=2, metavar="N", help="slots of a semaphore (default: 2)")
    parser.add_argument("--workers", type=number(2, 64), default=5, metavar="N", help="workers at a time (default: 5)")
    parser.add_argument(
        "--fault", action="append", choices=FAULTS, help="only these faults (default: all possible ones)"
    )
    parser.add_argument("--node-stop", metavar="COMMAND", help="command that kills node {node} of the broker")
    parser.add_argument(
        "--node-start", metavar="COMMAND", help="command that starts the node again, and ends when it serves clients"
    )
    parser.add_argument("--report-file", metavar="FILE", help="also write a report for programs to this file")
    add_output_flags(parser, default="text")
    add_former(parser, "--duration", "--duration-seconds")
    add_former(parser, "--json", "--report-file")


def prove_locks(arguments: argparse.Namespace, nodes: "Nodes | None" = None) -> int:
    """Run the proof and print the report. Raises: CommandFailed.

    ``nodes`` kills and restarts the broker's nodes. If it is None, the commands from the flags do so, if any.
    """
    # These modules are slow to load, and other commands do not need them.
    from popgate.domain.errors import StartupError
    from popgate.domain.locks import LockKind
    from popgate.prover.errors import BrokerMissing, ProverFailed
    from popgate.prover.nemesis import Fault
    from popgate.prover.report import Verdict, as_json, lines
    from popgate.prover.run import ProveOptions
    from popgate.prover.target import BUILT_IN, OVER_HTTP

    urls = _urls(arguments)
    nodes = nodes or _nodes(arguments, len(urls))
    if nodes is None and "node" in (arguments.fault or ()):
        raise CommandFailed("--fault node needs --node-stop and --node-start", ExitCode.USAGE)
    options = ProveOptions(
        implementation=arguments.implementation or (OVER_HTTP if arguments.http_url else BUILT_IN),
        urls=urls,
        kinds=[LockKind(kind) for kind in dict.fromkeys(arguments.kind or KINDS)],
        seed=secrets.randbelow(SEED_MAX) if arguments.seed is None else arguments.seed,
        duration_seconds=arguments.duration_seconds,
        slots=arguments.slots,
        workers=arguments.workers,
        faults=frozenset(Fault(fault) for fault in arguments.fault or FAULTS),
        over_http=bool(arguments.http_url),
    )
    try:
        report = asyncio.run(_prove(options, nodes, is_quiet=is_quiet(arguments)))
    except StartupError as error:
        raise CommandFailed(error.detail, ExitCode.USAGE) from error
    except BrokerMissing as error:
        raise CommandFailed(error.detail, ExitCode.UNREACHABLE) from error
    except ProverFailed as error:
        raise CommandFailed(error.detail) from error
    if arguments.report_file:
        Path(arguments.report_file).write_text(json.dumps(as_json(report), indent=2) + "\n", encoding="utf-8")
    output = output_of(arguments) if "output" in arguments else Output.TABLE
    if output is Output.JSON:
        print(json_line(as_json(report)))
    else:
        print(report.verdict if output is Output.NAME else "\n".join(lines(report)))
    if report.verdict is Verdict.VIOLATIONS:
        return ExitCode.FAILED
    if report.was_interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if report.verdict is Verdict.PASS else ExitCode.FAILED


def _urls(arguments: argparse.Namespace) -> list[str]:
    """Return the URLs of the proxies or of the broker's nodes, whichever the flags name. Raises: CommandFailed."""
    if arguments.http_url:
        if arguments.amqp_url:
            raise CommandFailed("--amqp-url and --http-url exclude each other", ExitCode.USAGE)
        for url in arguments.http_url:
            if (complaint := url_complaint(url)) is not None:
                raise CommandFailed(f"--http-url: {complaint}", ExitCode.USAGE)
            bearer_auth(None, httpx.URL(url))  # warns if the token will be sent without encryption
        return list(arguments.http_url)
    from_environment = config.environment().get("POPGATE_AMQP_URL")
    given: list[str] = arguments.amqp_url or ([from_environment] if from_environment else [])
    if not given:
        raise CommandFailed(
            "name the broker with --amqp-url (or POPGATE_AMQP_URL), or a proxy with --http-url", ExitCode.USAGE
        )
    try:
        return list(amqp_urls(given))
    except ValueError as error:
        raise CommandFailed(f"--amqp-url {error}", ExitCode.USAGE) from error


def _nodes(arguments: argparse.Namespace, count: int) -> "Nodes | None":
    from popgate.prover.nodes import CommandNodes

    if bool(arguments.node_stop) != bool(arguments.node_start):
        raise CommandFailed("--node-stop and --node-start go together", ExitCode.USAGE)
    if not arguments.node_stop:
        return None
    return CommandNodes(count, arguments.node_stop, arguments.node_start)


async def _prove(options: "ProveOptions", nodes: "Nodes | None", *, is_quiet: bool) -> "Report":
    from popgate.prover.run import ProgressListener, prove

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        """End the proof early, with a verdict. A second signal ends the process immediately."""
        stopping.set()
        complain("ending; a verdict on the results so far follows (Ctrl-C again: no verdict)")
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signal_number)

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stop)
    progress = Progress(sys.stderr, shown=False if is_quiet else None, verb="operations")

    def round_ended(kind: "KindReport") -> None:
        from popgate.prover.report import round_line

        progress.clear()
        if not is_quiet:
            print(round_line(kind), file=sys.stderr)

    listener = ProgressListener(counted=lambda count: progress.tell(count, 0), round_ended=round_ended)
    try:
        return await prove(options, nodes, listener, stopping)
    finally:
        progress.clear()
