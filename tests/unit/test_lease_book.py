"""Which leases of running handlers the client extends, and until when it trusts them: in simulated time."""

from popgate_client.leases import LeaseBook
from popgate_client.message import Message

LONG = 1_000.0


def message(handle: str = "h") -> Message:
    return Message(
        topic="t",
        group="g",
        receipt_handle=handle,
        body=b"",
        queue=0,
        delivery_count=1,
        first_delivered_at=0.0,
        invisible_until=0.0,
    )


def test_a_lease_is_extended_at_a_third_of_its_length_from_when_it_was_asked_for() -> None:
    book = LeaseBook(lease_seconds_max=LONG)
    book.hold(message(), 0.0, 60.0)
    assert book.due(14.0) == {}
    assert book.due(20.0) == {"h": 60.0}
    book.extended("h", 20.0)
    assert book.due(34.0) == {}
    assert book.due(40.0) == {"h": 60.0}


def test_a_lease_that_is_extended_no_more_is_lost_when_its_last_extension_has_ended() -> None:
    book, one = LeaseBook(lease_seconds_max=100.0), message()
    book.hold(one, 0.0, 60.0)
    book.extended("h", 90.0)
    assert book.due(120.0) == {}
    assert book.overdue(149.0) == []
    assert book.overdue(150.0) == ["h"]
    assert book.lost("h")
    assert one.lease_lost.is_set()
    assert not book.lost("h")


def test_the_end_of_a_lease_is_known_when_its_handler_has_ended() -> None:
    book = LeaseBook(lease_seconds_max=LONG)
    book.hold(message(), 0.0, 60.0)
    book.extended("h", 20.0)
    assert book.drop("h") == 80.0
    assert book.drop("h") is None
    book.extended("h", 40.0)
    assert book.rest_seconds(40.0, 60.0) == 20.0, "nothing is held"
