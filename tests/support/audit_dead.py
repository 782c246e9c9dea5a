"""The judge of dead letters: every dead message is there once, with the true reason, and no other message is there. A
redriven message is in the target topic instead, once; popgate hands out only one of two copies with the same id.

Pure. A move may be made twice if a fault happened up to `LATE_SECONDS` before it: its confirm was lost, and the same
copy was published again, so that the letter is there twice under one id.
"""

from collections import Counter
from collections.abc import Iterator

from support.audit import LOST, Audit, DeadLetter, History, Lease, Verb
from support.audit_taken import LATE_SECONDS


def misplaced(audit: Audit) -> Iterator[tuple[str, str, list[Lease]]]:
    """Return what is wrong with the dead letters of a drained group: message id, description, and the leases that
    show it.
    """
    if audit.dead_letters is None:
        return
    letters: dict[str, dict[str, DeadLetter]] = {}
    for letter in audit.dead_letters:
        letters.setdefault(letter.message_id, {})[letter.letter_id] = letter
    for message_id, history in audit.histories.items():
        own = list(letters.pop(message_id, {}).values())
        for what in _of_one(history, own, audit.max_deliveries, is_redriven=message_id in audit.redriven):
            yield message_id, what, history.leases
    for message_id in letters:
        yield message_id, "is a dead letter, but was never published", []


def moved_twice(audit: Audit) -> Iterator[tuple[str, str, list[Lease]]]:
    """Return messages that became several dead letters, and letters that were duplicated although no fault explains
    it.
    """
    letters = audit.dead_letters or ()
    ids: dict[str, set[str]] = {}
    for letter in letters:
        ids.setdefault(letter.message_id, set()).add(letter.letter_id)
    for message_id, history in audit.histories.items():
        if len(ids.get(message_id, ())) > 1:
            yield message_id, f"died {len(ids[message_id])} times", history.leases
        redriven = audit.redriven.get(message_id)
        if redriven is not None and message_id in ids:
            yield message_id, "was redriven, and is a dead letter", redriven.leases
        if redriven is not None and sum(lease.delivery_count == 1 for lease in redriven.leases) > 1:
            yield message_id, "was redriven twice", redriven.leases
    for letter, times in Counter(letters).items():
        known = audit.histories.get(letter.message_id)
        if times > 1 and known is not None and not _may_be_moved_again(audit, known):
            what = f"stands {times} times in the dead letters, and no fault has made it"
            yield letter.message_id, what, known.leases


def _may_be_moved_again(audit: Audit, history: History) -> bool:
    """Tell whether a fault happened before or during the move; the move began at the last lease at the earliest."""
    began = max((lease.sent for lease in history.leases), default=audit.began)
    return any(mark.at >= began - LATE_SECONDS for mark in audit.marks)


def _of_one(
    history: History, letters: list[DeadLetter], max_deliveries: int | None, *, is_redriven: bool
) -> Iterator[str]:
    settlements = [settlement for lease in history.leases for settlement in lease.settlements]
    statuses = {settlement.status for settlement in settlements}
    if not letters:
        if "rejected" in statuses and not is_redriven:
            yield "was rejected, and is no dead letter"
        return
    for letter in letters:
        if letter.cause == "rejected":
            if not any(one.verb is Verb.REJECT and one.status not in LOST for one in settlements):
                yield "is a dead letter by a rejection that no client sent"
        elif letter.cause != "max_deliveries":
            yield f"is a dead letter by {letter.cause!r}"
        elif max_deliveries is None or letter.delivery_count < max_deliveries:
            yield f"is a dead letter after {letter.delivery_count} hand-outs"
    least = max((lease.delivery_count for lease in history.leases), default=0)
    if any(letter.delivery_count < least for letter in letters):
        yield f"is a dead letter that was handed out more often than it says: {least} times"
