"""When settled records may be removed: only after proof by later deliveries."""

from popgate.domain.names import CopyId
from popgate.engine.queue.settlement_evidence import RETURNED_MAX_AFTER_RESTART, SettlementEvidence


def fresh() -> SettlementEvidence:
    """Return evidence without obligations from a former process, which knows of records settled until 10."""
    evidence = SettlementEvidence()
    evidence.sent(RETURNED_MAX_AFTER_RESTART, settled_at=10.0)
    evidence.channel_ended(RETURNED_MAX_AFTER_RESTART, buffered_count=0)
    assert evidence.settled_before(0) == 10.0
    return evidence


def test_acks_that_nothing_proves_keep_their_records() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    assert evidence.settled_before(9) == 10.0


def test_proved_acks_free_the_records_settled_until_then() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    evidence.sent(10, settled_at=60.0)
    assert evidence.settled_before(10) == 50.0
    assert evidence.settled_before(20) == 60.0


def test_an_old_settlement_whose_ack_went_out_late_holds_its_record() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    evidence.sent(1, settled_at=30.0)
    assert evidence.settled_before(10) == 30.0
    assert evidence.settled_before(11) == 50.0


def test_acks_of_repeated_copies_are_counted_and_prove_nothing() -> None:
    evidence = fresh()
    evidence.sent_for_nothing(5)
    evidence.sent(10, settled_at=50.0)
    assert evidence.settled_before(14) == 10.0
    assert evidence.settled_before(15) == 50.0


def test_the_records_of_a_former_process_stay_until_all_it_could_have_held_came_back() -> None:
    evidence = SettlementEvidence()
    evidence.sent(5, settled_at=110.0)
    assert evidence.settled_before(5) is None
    evidence.sent(RETURNED_MAX_AFTER_RESTART, settled_at=120.0)
    assert evidence.settled_before(RETURNED_MAX_AFTER_RESTART) == 110.0


def test_what_a_former_process_could_have_held_may_come_back_over_several_channels() -> None:
    evidence = SettlementEvidence()
    evidence.sent(40_000, settled_at=110.0)
    evidence.channel_ended(proved_acks=40_000, buffered_count=10)
    evidence.sent(25_535, settled_at=120.0)
    assert evidence.settled_before(25_534) is None
    assert evidence.settled_before(25_535) == 120.0


def test_after_a_lost_channel_all_that_was_unsettled_has_to_come_back_first() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    evidence.channel_ended(proved_acks=4, buffered_count=20)
    assert evidence.settled_before(25) is None
    assert evidence.settled_before(26) == 50.0


def test_newer_messages_that_came_along_with_the_returned_ones_may_come_back_ahead_of_them() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    evidence.channel_ended(proved_acks=0, buffered_count=0)
    evidence.sent(8, settled_at=60.0)
    evidence.channel_ended(proved_acks=8, buffered_count=30)
    assert evidence.settled_before(29) is None
    assert evidence.settled_before(30) == 60.0


def test_a_settled_message_that_is_not_here_holds_its_record() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    evidence.detached[CopyId("gone")] = 30.0
    assert evidence.settled_before(10) == 30.0
    del evidence.detached[CopyId("gone")]
    assert evidence.settled_before(10) == 50.0
