"""Defines ``popgate doctor``, which examines RabbitMQ and Redis, reports settings that endanger popgate, and fixes them
on request."""

import argparse
import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from popgate.cli.configured import options_of
from popgate.cli.endings import CommandFailed, ExitCode, Terminated
from popgate.cli.flags import Commands, add_output_flags
from popgate.cli.former_flags import add_former
from popgate.cli.printing import JsonObject, Output, complain, is_quiet, json_line, output_of, visible
from popgate.cli.serve import add_setting
from popgate.config.options import SETTINGS
from popgate.config.setting import Setting

if TYPE_CHECKING:
    from popgate.bootstrap.doctor import Doctor
    from popgate.doctor.findings import Examination, Finding, FixResult

OWN_SETTINGS = (
    "amqp_url",
    "amqp_url_file",
    "amqp_heartbeat_seconds",
    "management_url",
    "management_url_file",
    "replica_commands",
    "redis_url",
    "redis_url_file",
    "redis_namespace",
    "data_dir",
    "consumer_timeout_seconds",
    "replica_keeper",
    "log_level",
)
COULD_NOT_LOOK = ExitCode.USAGE
"""Exit code if nothing could be examined: 2, as for wrong usage."""
QUEUES_SHOWN_MAX = 5
ROUNDS_MAX = 3
"""Maximum number of rounds of --fix. Each round carries out the fixes that the previous examination found, and examines
again."""
EPILOG = """\
Run it with the settings of 'popgate serve', before popgate's first start or while popgate runs. AMQP alone is enough;
the output then lists what could not be checked. The management API (by default port 15672 of the same hosts) shows
policies, feature flags, permissions and the clock; RabbitMQ's command line tools, on this machine or as
--replica-commands says, show the versions of state machines. The doctor recognizes popgate's queues by their names, and
adopted queues by the catalog in Redis or in the data folder, or by --queue.

--fix prints each command, carries it out, and checks again. It changes policies, permissions and settings of Redis, but
never a queue, an operator policy or a feature flag; it ignores findings of severity info.

Exit codes: 0 nothing to fix, 1 warnings or errors remain, 2 the check failed, 130 Ctrl-C.
docs/doctor.md describes all findings.

examples:
  popgate doctor --amqp-url amqp://popgate:secret@rabbit-1/ --redis-url redis://redis-1/
  popgate doctor --amqp-url amqp://popgate:secret@rabbit-1/ --management-url http://admin:secret@rabbit-1:15672
  popgate doctor --amqp-url amqp://popgate:secret@rabbit-1/ --queue orders --queue invoices
  popgate doctor --fix
  popgate doctor -o json | jq '.findings[] | select(.severity != "info")'
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find and fix settings of RabbitMQ and Redis that harm popgate",
        description="Find and fix settings of RabbitMQ and Redis that harm popgate.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--fix", action="store_true", help="show and carry out the commands that fix the findings")
    add_output_flags(parser, default="text")
    add_former(parser, "--json", "-o json", value="json")
    parser.add_argument(
        "--queue",
        action="append",
        default=[],
        metavar="NAME",
        help="check this queue as if popgate had adopted it; may be repeated",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (POPGATE_CONFIG)")
    for setting in _settings():
        add_setting(parser, setting.flag, setting)
    parser.set_defaults(run=run)


def _settings() -> Sequence[Setting]:
    return [setting for setting in SETTINGS if setting.name in OWN_SETTINGS]


def run(arguments: argparse.Namespace) -> int:
    """Examine RabbitMQ and Redis, apply fixes if requested, and print the findings. Raises: CommandFailed."""
    from popgate.bootstrap import rabbit_options
    from popgate.bootstrap.doctor import doctor
    from popgate.domain.errors import PopgateError
    from popgate.runtime.logs import configure_logging

    configure_logging("error" if arguments.log_level is None else arguments.log_level)
    # If RabbitMQ can't be reached, the adapter logs the reason in one line. Its library would log the reason again.
    logging.getLogger("aiormq.connection").setLevel(logging.CRITICAL)
    options = options_of(arguments, _settings(), on_broker=True)
    output = output_of(arguments) if "output" in arguments else Output.TABLE

    async def working() -> int:
        this = asyncio.current_task()
        assert this is not None, "asyncio.run runs it"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        async with doctor(options, rabbit_options(options), tuple(dict.fromkeys(arguments.queue))) as at_work:
            return await _work(at_work, fixes=arguments.fix, output=output, is_quiet=is_quiet(arguments))

    try:
        return asyncio.run(working())
    except asyncio.CancelledError as error:
        raise Terminated from error
    except PopgateError as error:
        raise CommandFailed(f"could not look: {error.detail}", COULD_NOT_LOOK) from error


async def _work(doctor: "Doctor", *, fixes: bool, output: Output, is_quiet: bool) -> int:
    found = await doctor.examine()
    results: list[FixResult] = []
    if fixes:
        found = await _apply_fixes(doctor, found, results, is_shown=output.is_table)
    if output is Output.JSON:
        print(json_line(_json(doctor.place, found, results)))
    elif output is Output.NAME:
        for finding in found.findings:
            print(finding.code)
    else:
        _print(doctor.place, found)
    if not is_quiet and output is not Output.JSON:
        complain(_summary(found, was_fixed=bool(results)))
    return ExitCode.FAILED if found.to_fix else ExitCode.OK


async def _apply_fixes(
    doctor: "Doctor", found: "Examination", results: "list[FixResult]", *, is_shown: bool
) -> "Examination":
    """Carry out every fix once, and return the result of the last examination. After each round of fixes, examine
    again, because a changed policy may reveal another finding."""
    tried: set[str] = set()
    for _ in range(ROUNDS_MAX):
        fixes = [fix for fix in found.fixes if fix.command not in tried]
        if not fixes:
            break
        for fix in fixes:
            tried.add(fix.command)
            if is_shown:
                print(f"fix: {visible(fix.command)}", flush=True)
            done = await doctor.apply_fix(fix)
            results.append(done)
            if is_shown and done.note:
                print(f"     {'done' if done.is_done else 'failed'}: {visible(done.note)}", flush=True)
        found = await doctor.examine()
    return found


def _json(place: str, found: "Examination", results: "Sequence[FixResult]") -> JsonObject:
    return {
        "place": place,
        "rabbitmq_version": ".".join(map(str, found.version)),
        "findings": [
            {
                "code": finding.code,
                "severity": finding.severity,
                "found": finding.found,
                "why": finding.why,
                "queues": finding.queues,
                "command": finding.command,
                "fixable": finding.fix is not None and finding.needs_fix,
            }
            for finding in found.findings
        ],
        "not_looked_at": [{"what": one.what, "why": one.why, "flag": one.flag} for one in found.unseen],
        "fixed": [{"command": one.command, "done": one.is_done, "note": one.note} for one in results],
    }


def _print(place: str, found: "Examination") -> None:
    print(visible(place) + f" (version {'.'.join(map(str, found.version)) or 'unknown'})")
    for finding in found.findings:
        _print_finding(finding)
    if found.unseen:
        print("\nNot looked at:")
        for one in found.unseen:
            print(f"  {visible(one.what)}\n    why:  {visible(one.why)}\n    flag: {visible(one.flag)}")


def _summary(found: "Examination", *, was_fixed: bool) -> str:
    to_fix, notes = len(found.to_fix), len(found.findings) - len(found.to_fix)
    hint = f"; 'popgate doctor --fix' carries out {_count(len(found.fixes), 'command')}" if found.fixes else ""
    if was_fixed and found.fixes:
        hint = ""
    return f"{_count(to_fix, 'finding')} to fix, {_count(notes, 'note')}{hint}"


def _print_finding(finding: "Finding") -> None:
    print(f"\n{finding.severity.upper()} {finding.code}: {visible(finding.found)}")
    if finding.queues:
        shown = ", ".join(finding.queues[:QUEUES_SHOWN_MAX])
        more = len(finding.queues) - QUEUES_SHOWN_MAX
        print(f"  queues: {visible(shown)}{f' and {more} more' if more > 0 else ''}")
    print(f"  why:    {visible(finding.why)}\n  fix:    {visible(finding.command)}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
