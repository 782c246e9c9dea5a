"""When settled records may be forgotten: only what later deliveries have proved."""

from popgate.domain.names import CopyId
from popgate.engine.evidence import RETURNED_MAX_AFTER_RESTART, SettlementEvidence


def fresh() -> SettlementEvidence:
    evidence = SettlementEvidence()
    assert evidence.settled_before(RETURNED_MAX_AFTER_RESTART) is None
    return evidence


def test_acks_that_nothing_proves_keep_their_records() -> None:
    evidence = fresh()
    evidence.sent(RETURNED_MAX_AFTER_RESTART + 10, settled_at=50.0)
    assert evidence.settled_before(RETURNED_MAX_AFTER_RESTART) is None


def test_proved_acks_free_the_records_settled_until_then() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    evidence.sent(10, settled_at=60.0)
    assert evidence.settled_before(10) == 50.0
    assert evidence.settled_before(20) == 60.0


def test_the_records_of_a_former_process_stay_until_all_it_could_have_held_came_back() -> None:
    evidence = SettlementEvidence()
    evidence.sent(5, settled_at=110.0)
    assert evidence.settled_before(5) is None
    assert evidence.settled_before(RETURNED_MAX_AFTER_RESTART) == 110.0


def test_after_a_lost_channel_all_that_was_unsettled_has_to_come_back_first() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    evidence.channel_ended(proved_acks=4, held=20)
    assert evidence.settled_before(25) is None
    assert evidence.settled_before(26) == 50.0


def test_a_settled_message_that_is_not_here_holds_its_record() -> None:
    evidence = fresh()
    evidence.sent(10, settled_at=50.0)
    evidence.detached[CopyId("gone")] = 30.0
    assert evidence.settled_before(10) == 30.0
    del evidence.detached[CopyId("gone")]
    assert evidence.settled_before(10) == 50.0
