"""`popgate-pipeline JOB`: runs the jobs on the delivery journal, on this machine or on a cluster.

Owns flags, progress on standard error, and exit codes: 0 done (audit: clean), 1 the audit found faults, 2 wrong usage
or the job could not finish, 130 interrupted. `spark-submit` of this file does the same.
"""

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from popgate_spark.credential_flags import hide_credentials

UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}
INSTALL_HINT = "popgate-pipeline: pyspark is not installed: pip install 'popgate[spark]'"
MASTER_HELP = "where Spark runs: local[*] (default), local[2], spark://host:7077, yarn, k8s://..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. None: the flags of this process. Their credentials are hidden."""
    if arguments is None:
        hide_credentials()  # before the slower imports
    parsed = parser().parse_args(arguments)
    try:
        from popgate_spark.running import run
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] not in ("pyspark", "py4j", "pyarrow", "pandas"):
            raise
        sys.stderr.write(f"{INSTALL_HINT}\n")
        return 2
    try:
        return run(parsed, progress_of(quiet=parsed.quiet))
    except KeyboardInterrupt:
        sys.stderr.write("popgate-pipeline: interrupted; earlier results are unchanged\n")
        return 128 + signal.SIGINT


def progress_of(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that writes the next step to standard error, with the seconds so far."""
    began = time.monotonic()

    def say(what: str) -> None:
        if not quiet:
            sys.stderr.write(f"[{time.monotonic() - began:5.1f} s] {what}\n")
            sys.stderr.flush()

    return say


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="popgate-pipeline",
        description="Reads popgate's delivery journal with Spark: shows whether everything was delivered, how the load"
        " is balanced, how fast it was, and which settings to change.",
        epilog="Each job writes Parquet tables and report.html into --out. popgate-pipeline JOB --help shows more.",
        allow_abbrev=False,
    )
    jobs = top.add_subparsers(dest="job", required=True, metavar="JOB")
    _audit(jobs)
    _balance(jobs)
    _latency(jobs)
    _advice(jobs)
    return top


def _audit(jobs: Any) -> None:
    job = _job(
        jobs,
        "audit",
        "account for every message: lost, stuck, delivered twice, out of order",
        "Exit code: 0 clean, 1 faults found, 2 the audit could not be done",
        [
            "popgate-pipeline audit --journal /var/lib/popgate/journal",
            "popgate-pipeline audit --journal /journal --from 24h --out /reports/today",
            "popgate-pipeline audit --journal /journal --state /reports/state --out /reports/audit   # every hour",
        ],
    )
    job.add_argument(
        "--state",
        metavar="FOLDER",
        help="store the audit's state here, and read only complete hours that are new; the result is the same",
    )
    job.add_argument(
        "--horizon",
        type=seconds,
        default=3_600.0,
        metavar="SECONDS",
        help="longer than any delay after a release; a message that waits longer while its queue is delivered counts as"
        " lost (default 3600)",
    )
    job.add_argument(
        "--stuck-after",
        type=seconds,
        default=43_200.0,
        metavar="SECONDS",
        help="a lease that is older is stuck, even if it is extended repeatedly (default 43200)",
    )
    job.add_argument(
        "--clock-error",
        type=seconds,
        default=0.1,
        metavar="SECONDS",
        help="maximum difference between the proxies' clocks (default 0.1)",
    )
    job.add_argument(
        "--strict", action="store_true", help="exit code 1 also if faults are not certain or the journal has gaps"
    )


def _balance(jobs: Any) -> None:
    job = _job(
        jobs,
        "balance",
        "how the work is shared among clients, queues and proxies; which clients hang, which queues are hot",
        "",
        [
            "popgate-pipeline balance --journal /journal --from 24h",
            "popgate-pipeline balance --journal s3a://b/journal",
        ],
    )
    _of_topic(job)


def _latency(jobs: Any) -> None:
    job = _job(
        jobs,
        "latency",
        "how long delivery and ack take over time, and how many messages wait",
        "With --follow: while the journal is being written",
        [
            "popgate-pipeline latency --journal /journal --from 24h",
            "popgate-pipeline latency --journal /journal --topic orders --step 60",
            "popgate-pipeline latency --journal /journal --follow --step 60",
        ],
    )
    _of_topic(job)
    job.add_argument("--step", type=whole, metavar="SECONDS", help="step of the plots (default: 200 steps; live: 60)")
    job.add_argument("--follow", action="store_true", help="live: print every step once, when it is complete")
    job.add_argument("--available-now", action="store_true", help="like --follow, but end after the existing files")
    job.add_argument(
        "--late",
        type=whole,
        default=600,
        metavar="SECONDS",
        help="live: maximum time from an event to its file; the proxies' rotation age (default 600)",
    )
    job.add_argument(
        "--trigger", type=seconds, default=10.0, metavar="SECONDS", help="live: interval between looks (default 10)"
    )


def _advice(jobs: Any) -> None:
    job = _job(
        jobs,
        "advice",
        "which values to change: invisibility timeout, max_in_flight, consumers, queues, each with a reason",
        "",
        [
            "popgate-pipeline advice --journal /journal --from 7d",
            "popgate-pipeline advice --journal /journal --from 7d --apply --url http://127.0.0.1:8080",
        ],
    )
    _of_topic(job)
    job.add_argument(
        "--quantile",
        type=share,
        default=0.999,
        metavar="SHARE",
        help="the share of messages that must be handled before their lease ends (default 0.999)",
    )
    job.add_argument(
        "--apply", action="store_true", help="show the difference to the proxies' settings, and change them"
    )
    job.add_argument("--yes", action="store_true", help="with --apply: do not ask for confirmation")
    job.add_argument(
        "--setting",
        dest="settings",
        action="append",
        choices=("invisibility_seconds", "max_in_flight"),
        help="with --apply: change this one; repeatable (default: invisibility_seconds)",
    )
    job.add_argument("--url", help="with --apply: a proxy (default $POPGATE_URL, else http://127.0.0.1:8080)")
    job.add_argument(
        "--token-file", help="with --apply: file that contains an API key or a token (default: $POPGATE_TOKEN)"
    )


def _of_topic(job: argparse.ArgumentParser) -> None:
    job.add_argument("--topic", help="only this topic")


def _job(jobs: Any, name: str, about: str, more: str, examples: list[str]) -> argparse.ArgumentParser:
    job: argparse.ArgumentParser = jobs.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.{' ' + more + '.' if more else ''}",
        epilog="examples:\n" + "\n".join(f"  {one}" for one in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    at_hand = os.environ.get("POPGATE_JOURNAL")
    job.add_argument(
        "--journal",
        metavar="FOLDER",
        required=at_hand is None,
        default=at_hand,
        help="the journal: the folder of the proxies' --journal, as Spark names it (default $POPGATE_JOURNAL)",
    )
    job.add_argument("--out", metavar="FOLDER", default=f"popgate-{name}", help=f"default popgate-{name}")
    job.add_argument(
        "--from",
        dest="since",
        type=moment,
        metavar="TIME",
        help="from this hour on: 2026-11-01, 2026-11-01T05:00 (UTC), or 90m, 24h, 7d ago (default: from the beginning)",
    )
    job.add_argument(
        "--to",
        dest="until",
        type=moment,
        metavar="TIME",
        help="up to, but not including, this hour (default: to the end)",
    )
    job.add_argument("--master", metavar="URL", help=MASTER_HELP)
    job.add_argument(
        "--memory", metavar="SIZE", default=None, help="memory of Spark's driver, if it runs here (default 2g)"
    )
    job.add_argument(
        "--conf", action="append", default=[], type=setting, metavar="KEY=VALUE", help="a setting of Spark; repeatable"
    )
    job.add_argument("--quiet", action="store_true", help="do not show the progress")
    return job


def moment(text: str) -> datetime:
    """Parse a time in ISO form (UTC if it has no zone), or a time ago such as 24h."""
    if (ago := re.fullmatch(r"(\d{1,6})([mhd])", text)) is not None:
        return datetime.now(UTC) - int(ago[1]) * UNITS[ago[2]]
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be like 2026-11-01, 2026-11-01T05:00 or 24h") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds, 0 or more")
    return found


def whole(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) <= 86_400):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole seconds, 1 to 86400")
    return int(text)


def share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.5 <= found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0.5 and less than 1, like 0.999")
    return found


def setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.startswith("spark.")):
        raise argparse.ArgumentTypeError(f"{text!r} must be like spark.executor.memory=4g")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
