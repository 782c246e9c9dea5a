"""Presents balance, latency and advice: reports, and a few lines for the terminal.

Reads the first rows of aggregates.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from popgate_spark.jobs.advice import Advice
from popgate_spark.jobs.balance import Balance
from popgate_spark.jobs.latency import POINTS_MAX, Latency
from popgate_spark.report.page import Page, key, note, table
from popgate_spark.report.plots import SERIES_MAX, Bar, Line, amount, bars, lines

ROWS_MAX = 200
"""Maximum rows of a table in a report."""


def balance_report(found: Balance, hours: str) -> tuple[str, str]:
    """Return the report's HTML, and lines for the terminal."""
    page = _page("Who does the work?", f"popgate balance of {hours}")
    clients = _rows(found.clients, "topic", "group", F.desc("handed_out"))
    queues = _rows(found.queues, "topic", F.desc("published"))
    proxies = _rows(found.proxies, "proxy")
    skews = _rows(found.skews, "topic", "group", "of")
    hot = _rows(found.hot, "topic", "queue", "since")
    ill = [row for row in clients if row["condition"] is not None]
    said = [
        f"{row['condition'].upper()} {row['topic']}/{row['group']} {row['client']}: {row['ran_out']:,} leases expired,"
        " nothing settled since"
        for row in ill
    ]
    spans: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    for row in hot:
        spans[row["topic"], row["queue"]].append(row)
    for (topic, queue), of in spans.items():
        worst = max(of, key=lambda row: row["score"])
        said.append(
            f"HOT {topic} queue {queue}: {worst['messages']:,} messages in 5 minutes from {worst['since']:%m-%d %H:%M},"
            f" {worst['usual']:,.0f} are usual; {len(of)} such spans"
        )
    said += [
        f"{row['topic']}/{row['group']}: skew {row['skew']:.2f} over {row['members']} {row['of']}s" for row in skews
    ]
    page.verdict("warn" if ill or hot else "good", said[0] if ill or hot else "No client hangs, no queue is hot", "")
    page.section(
        "Clients",
        key(("acked", "redelivered", "expired")),
        bars("deliveries by client: acked, released, expired", [_client_bar(row) for row in clients]),
        _table(found.clients, clients),
        note("busy seconds: the total time of all leases. a second: acks. hangs: takes messages and settles none."),
    )
    page.section(
        "Queues", bars("messages published by queue", [_queue_bar(row) for row in queues]), _table(found.queues, queues)
    )
    page.section("Hot queues", _table(found.hot, hot))
    page.section("Proxies", _table(found.proxies, proxies))
    page.section(
        "Skew", _table(found.skews, skews), note("The ratio of the largest share to an even share: 1 is even.")
    )
    return page.html(), "\n".join(said)


def latency_report(found: Latency, hours: str, step_seconds: int) -> tuple[str, str]:
    """Return the report's HTML, and lines for the terminal."""
    page = _page("How fast was it?", f"popgate latency of {hours}, in steps of {step_seconds} s")
    totals = _rows(found.totals, F.desc("delivered"))
    said = [
        f"{row['topic']}/{row['group']}: to delivery p50 {_s(row['to_delivery_p50'])}, p99 {_s(row['to_delivery_p99'])}"
        f"; to ack p50 {_s(row['to_ack_p50'])}, p99 {_s(row['to_ack_p99'])}"
        for row in totals
    ]
    for total in totals[:SERIES_MAX]:
        mine = found.steps.where((F.col("topic") == total["topic"]) & (F.col("group") == total["group"]))
        steps = mine.orderBy("since").limit(2 * POINTS_MAX).collect()
        page.section(
            f"{total['topic']}/{total['group']}",
            *(
                lines(f"{title}, seconds", _quantiles(steps, name), logarithmic=True)
                for name, title in (("to_delivery", "visible to first delivery"), ("to_ack", "delivery to ack"))
            ),
            lines("messages that wait or are leased", [_line("waiting", steps, "waiting", 1)]),
            lines(
                "messages a second",
                [_line(name, steps, name, step_seconds) for name in ("came", "delivered", "ended")],
            ),
        )
    page.section("Of the whole range", _table(found.totals, totals))
    return page.html(), "\n".join(said)


def advice_report(advice: Sequence[Advice], hours: str) -> tuple[str, str]:
    """Return the report's HTML, and lines for the terminal."""
    page = _page("What should change?", f"popgate advice from {hours}")
    by_name: defaultdict[str, list[Advice]] = defaultdict(list)
    for one in advice:
        by_name[f"{one.topic}/{one.group}"].append(one)
    said: list[str] = []
    for name, of in by_name.items():
        rows = [(one.setting, _figure(one.present), _figure(one.wanted), one.reason) for one in of]
        page.section(name, table(("setting", "now", "advised", "why"), rows))
        said += [
            f"{name} {setting}: {now or '?'} -> {wanted or 'unknown'}  ({reason})"
            for setting, now, wanted, reason in rows
        ]
    return page.html(), "\n".join(said)


def _page(title: str, about: str) -> Page:
    return Page(title, f"{about}, made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")


def _rows(found: DataFrame, *order: Any) -> list[Any]:
    return found.orderBy(*order).limit(ROWS_MAX).collect()


def _table(found: DataFrame, rows: Sequence[Any]) -> str:
    cells = [
        ["" if value is None else f"{value:%m-%d %H:%M:%S}" if isinstance(value, datetime) else value for value in row]
        for row in rows
    ]
    return table([name.replace("_", " ") for name in found.columns], cells)


def _client_bar(row: Any) -> Bar:
    back = row["released"] + row["rejected"]
    parts = [("acked", float(row["acked"])), ("redelivered", float(back)), ("expired", float(row["expired"]))]
    return Bar(f"{row['group']} {row['client']}", parts, row["condition"] or "")


def _queue_bar(row: Any) -> Bar:
    return Bar(f"{row['topic']} {row['queue']}", [("main", float(row["published"]))], f"{100 * row['share']:.1f} %")


def _quantiles(steps: Sequence[Any], name: str) -> list[Line]:
    return [_line(label, steps, f"{name}_{label}", 1) for label in ("p50", "p90", "p99", "max")]


def _line(label: str, steps: Sequence[Any], column: str, divisor: float) -> Line:
    return Line(
        label,
        [(row["since"].timestamp(), None if row[column] is None else row[column] / divisor) for row in steps],
    )


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{amount(seconds)} s"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
