"""The clients of expired leases, which the next grant records."""

from popgate.domain.attempts import noted, read
from popgate.domain.names import CopyId, LeaseId
from popgate.engine.lease.expired_clients import REMEMBERED_MAX, REMEMBERED_SECONDS, ExpiredClients
from popgate.engine.queue.buffered import BufferedMessage, Counts

LEASE = LeaseId("lease")


def message(copy_id: str, client: str | None = None) -> BufferedMessage:
    buffered = BufferedMessage(Counts(), 0, CopyId(copy_id))
    buffered.lease_id, buffered.client = LEASE, client
    return buffered


def test_an_expired_lease_is_recorded_with_its_client_also_if_the_message_came_again_meanwhile() -> None:
    clients = ExpiredClients()
    clients.note(message("a", "w-1"), 0.0)
    again = message("a")
    attempts = clients.attempts([message("b"), again])
    assert attempts is not None
    (attempt,) = read(noted("", attempts[LEASE], 1, 1.0, 2.0))[1]
    assert (attempt.client, attempt.outcome, clients.client_of(again)) == ("w-1", "expired", "w-1")
    again.lease_id = LeaseId("that of another owner")
    assert clients.client_of(again) == ""
    clients.forget([again])
    assert clients.attempts([again]) is None
    assert not clients


def test_a_client_without_a_name_replaces_the_one_before() -> None:
    clients = ExpiredClients()
    clients.note(message("a", "w-1"), 0.0)
    clients.note(message("a"), 1.0)
    assert clients.attempts([message("a")]) is None


def test_only_the_latest_are_remembered() -> None:
    clients = ExpiredClients()
    for number in range(REMEMBERED_MAX + 10):
        clients.note(message(str(number), "w-1"), 0.0)
    assert len(clients) == REMEMBERED_MAX
    assert clients.attempts([message("9")]) is None
    clients.note(message("late", "w-1"), REMEMBERED_SECONDS + 1)
    assert len(clients) == 1
