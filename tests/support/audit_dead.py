"""The judge of dead letters: whatever died is there, once, for the reason that it says, and nothing else is.

Pure. A letter may stand there twice under one id: its confirm was lost, and it was published again as the same copy.
"""

from collections.abc import Iterator

from support.audit import LOST, Audit, DeadLetter, History, Lease, Verb


def misplaced(audit: Audit) -> Iterator[tuple[str, str, list[Lease]]]:
    """What is wrong with the letters of a drained group: message id, what, and the leases that show it."""
    if audit.dead_letters is None:
        return
    letters: dict[str, dict[str, DeadLetter]] = {}
    for letter in audit.dead_letters:
        letters.setdefault(letter.message_id, {})[letter.letter_id] = letter
    for message_id, history in audit.histories.items():
        own = list(letters.pop(message_id, {}).values())
        for what in _of_one(history, own, audit.max_deliveries):
            yield message_id, what, history.leases
    for message_id in letters:
        yield message_id, "is a dead letter, but nobody published it", []


def _of_one(history: History, letters: list[DeadLetter], max_deliveries: int | None) -> Iterator[str]:
    settlements = [settlement for lease in history.leases for settlement in lease.settlements]
    statuses = {settlement.status for settlement in settlements}
    if not letters:
        if "rejected" in statuses:
            yield "was rejected, and is no dead letter"
        return
    if len(letters) > 1:
        yield f"died {len(letters)} times"
    if statuses & {"acked", "already_acked"}:
        yield "was acked, and is a dead letter"
    for letter in letters:
        if letter.cause == "rejected":
            if not any(one.verb is Verb.REJECT and one.status not in LOST for one in settlements):
                yield "is a dead letter by a rejection that nobody asked for"
        elif letter.cause != "max_deliveries":
            yield f"is a dead letter by {letter.cause!r}"
        elif max_deliveries is None or letter.delivery_count < max_deliveries:
            yield f"is a dead letter after {letter.delivery_count} hand-outs"
    least = max((lease.delivery_count for lease in history.leases), default=0)
    if any(letter.delivery_count < least for letter in letters):
        yield f"is a dead letter that was handed out more often than it says: {least} times"
