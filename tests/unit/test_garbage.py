"""When the garbage collector scans everything, because queues were deleted."""

from popgate.runtime.garbage import MESSAGES_PER_QUEUE, QUEUES_MIN, SECONDS_MIN, DeletedQueues


class Scans:
    """A collector that counts its scans, and a clock that stands still."""

    def __init__(self) -> None:
        self.count = 0
        self.now = 1_000.0
        self.deleted = DeletedQueues(self.scan, lambda: self.now)

    def scan(self) -> None:
        self.count += 1

    def delete(self, count: int, messages: int = 0) -> int:
        """Delete queues one by one, and return how many scans there have been."""
        for _ in range(count):
            self.deleted.add(1, lambda: messages)
        return self.count


def test_a_few_deletions_start_no_scan_and_many_start_one() -> None:
    scans = Scans()
    assert scans.delete(QUEUES_MIN - 1) == 0
    assert scans.delete(1) == 1
    scans.now += SECONDS_MIN
    assert scans.delete(QUEUES_MIN - 1) == 1
    assert scans.delete(1) == 2


def test_a_scan_of_many_messages_is_rarer() -> None:
    scans, messages = Scans(), MESSAGES_PER_QUEUE * 1_000
    assert scans.delete(QUEUES_MIN + 999, messages) == 0
    assert scans.delete(1, messages) == 1


def test_two_scans_have_a_pause_between_them() -> None:
    scans = Scans()
    assert scans.delete(QUEUES_MIN * 10) == 1
    scans.now += SECONDS_MIN
    assert scans.delete(1) == 2
