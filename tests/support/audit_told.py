"""Formats the smallest history that shows a broken promise as lines of text. Pure."""

from collections.abc import Iterable, Sequence

from support.audit import PLAIN, Audit, History, Lease, Mark, Traits, Verb

MARKS_AFTER_SECONDS = 5.0
"""Seconds before an event within which a disturbance of the servers is shown as a possible cause."""


def tell(audit: Audit, message_id: str) -> str:
    """Return everything about one message."""
    history = audit.histories[message_id]
    return "\n    ".join([message_id, *history_lines(audit, history, history.leases)])


def raised(error: BaseException) -> list[str]:
    """Return the exceptions that were raised, possibly by several tasks."""
    parts: Sequence[BaseException] = getattr(error, "exceptions", ())
    return [told for part in parts for told in raised(part)] if parts else [str(error)]


def history_lines(audit: Audit, history: History | None, leases: Iterable[Lease] = ()) -> list[str]:
    """Return the publish, the relevant leases, and the disturbances of the servers in that time."""
    lines: list[tuple[float, str]] = []
    began = audit.began
    if history is not None and (publish := history.publish) is not None:
        what = f"publish{_asked(publish.traits)}: {publish.status or 'no answer'}"
        lines.append((publish.sent, _line(began, publish.sent, publish.answered, what)))
    for lease in leases:
        what = (
            f"pop by {lease.client}: lease ...{lease.receipt_handle[-12:]}, delivery {lease.delivery_count}, "
            f"live at least until {lease.ends_at - began:.3f}"
        )
        lines.append((lease.sent, _line(began, lease.sent, lease.answered, what)))
        for settlement in lease.settlements:
            seconds = f" by {settlement.seconds:g} s" if settlement.verb is Verb.EXTEND else ""
            what = f"{settlement.verb}{seconds} of ...{lease.receipt_handle[-12:]}: {settlement.status or 'no answer'}"
            lines.append((settlement.sent, _line(began, settlement.sent, settlement.answered, what)))
    if lines:
        first, last = min(at for at, _ in lines), max(at for at, _ in lines) + MARKS_AFTER_SECONDS
        lines += [_mark_line(began, mark) for mark in audit.marks if first <= mark.at <= last]
    return [line for _, line in sorted(lines)]


def _asked(traits: Traits) -> str:
    asked = {name: value for name, value in traits._asdict().items() if value != getattr(PLAIN, name)}
    return f" ({', '.join(f'{name} {value}' for name, value in asked.items())})" if asked else ""


def _line(began: float, sent: float, answered: float, what: str) -> str:
    end = "   ....  " if answered == float("inf") else f"{answered - began:9.3f}"
    return f"{sent - began:9.3f} -{end}  {what}"


def _mark_line(began: float, mark: Mark) -> tuple[float, str]:
    return mark.at, f"{mark.at - began:9.3f}            *** {mark.what}"
