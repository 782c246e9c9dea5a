"""A pop is forwarded to another owner only if messages may wait there for longer than here."""

from popgate.domain.names import InstanceId
from popgate.engine.cluster.other_backlogs import BEHIND_SECONDS, OtherBacklogs

OTHER = InstanceId("other")
NOW = 100.0


def test_an_owner_whose_backlog_is_unknown_may_be_behind() -> None:
    backlogs = OtherBacklogs()
    assert backlogs.is_behind(OTHER, NOW)
    backlogs.heard(OTHER, 0.0, NOW)
    assert backlogs.is_behind(OTHER, None), "the wait of this proxy's messages is unknown"
    backlogs.heard(OTHER, None, NOW)
    assert backlogs.is_behind(OTHER, NOW - 50.0), "its own clients take nothing any more"


def test_an_owner_is_behind_if_its_messages_wait_for_longer() -> None:
    backlogs = OtherBacklogs()
    backlogs.heard(OTHER, 5.0, NOW)
    assert not backlogs.is_behind(OTHER, NOW - 50.0)
    assert not backlogs.is_behind(OTHER, NOW - 5.0)
    assert backlogs.is_behind(OTHER, NOW - 5.0 + 2 * BEHIND_SECONDS)


def test_an_owner_that_reports_nothing_further_is_soon_taken_to_be_behind() -> None:
    backlogs = OtherBacklogs()
    backlogs.heard(OTHER, 1.0, NOW)
    assert not backlogs.is_behind(OTHER, NOW - 1.0)
    assert backlogs.is_behind(OTHER, NOW + 2 * BEHIND_SECONDS - 1.0), "the messages here have become younger meanwhile"
