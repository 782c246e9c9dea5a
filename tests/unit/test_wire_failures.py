"""A peer's error reaches the caller unchanged."""

from collections.abc import Iterator
from typing import Any

import pytest

from popgate.domain import errors
from popgate.domain.errors import PopgateError, RetryLater
from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.ports.peers import CountMessages
from popgate.wire import version_1
from popgate.wire.codec import CODEC
from popgate.wire.version_1.failures import DETAIL_LENGTH_MAX, KINDS, Failure, error_of
from releases import earlier_wire
from releases.earlier_wire import failures as earlier_failures

ASKED = CountMessages(subscription=Subscription(TopicName("t"), GroupName("g")))
EXTRAS: dict[type[PopgateError], dict[str, Any]] = {
    errors.InvalidRequest: {"field": "messages[3].body"},
    errors.MessageTooLarge: {"field": "body"},
    errors.WrongMode: {"mode": "pull"},
    errors.QuotaExceeded: {"setting": "topics_max"},
    errors.BrokerUnavailable: {"retry_after_seconds": 2.5, "outcome_unknown": True},
}


def extras(family: type[PopgateError]) -> dict[str, Any]:
    return EXTRAS.get(family, {"retry_after_seconds": 7.5} if issubclass(family, RetryLater) else {})


def answered(error: PopgateError) -> PopgateError:
    """Return what the caller gets."""
    with pytest.raises(PopgateError) as caught:
        CODEC.decode_answer(ASKED, CODEC.encode_error(1, error))
    return caught.value


def families(root: type[PopgateError]) -> Iterator[type[PopgateError]]:
    yield root
    for family in root.__subclasses__():
        yield from families(family)


def test_every_error_of_the_domain_has_a_name_but_the_root_and_those_that_end_the_process() -> None:
    of_callers = {errors.Unauthenticated, errors.Forbidden, errors.LimitExceeded}  # messages have no caller
    unserved = {PopgateError, *of_callers, *families(errors.StartupError)}
    of_domain = {family for family in families(PopgateError) if family.__module__ == errors.__name__}
    assert set(KINDS.values()) == of_domain - unserved


@pytest.mark.parametrize("name", KINDS)
def test_an_error_comes_back_as_the_same_type_with_all_that_it_says(name: str) -> None:
    family = KINDS[name]
    sent = family("what is wrong", **extras(family))
    got = answered(sent)
    assert type(got) is family
    assert vars(got) == vars(sent)
    assert got.args == sent.args


@pytest.mark.parametrize("name", earlier_failures.KINDS)
def test_an_error_is_told_as_when_version_1_was_released(name: str) -> None:
    """A caller that does not know a newer kind of error retries."""
    family = KINDS[name]
    error = family("what is wrong", **extras(family))
    told = earlier_wire.encode_error(error)
    assert version_1.encode_error(error) == told
    with pytest.raises(family):
        version_1.decode_answer(ASKED, told)
    with pytest.raises(family):
        earlier_wire.decode_answer(ASKED, told)


def test_an_error_of_a_kind_without_a_name_comes_back_as_its_nearest_ancestor() -> None:
    class FullDisk(errors.StateUnavailable):
        pass

    got = answered(FullDisk("full", retry_after_seconds=3))
    assert type(got) is errors.StateUnavailable
    assert vars(got) == {"detail": "full", "retry_after_seconds": 3}


@pytest.mark.parametrize("sent", [PopgateError("odd"), errors.StartupError("odd")])
def test_an_error_that_nobody_foresaw_says_nothing_against_the_request(sent: PopgateError) -> None:
    got = answered(sent)
    assert type(got) is RetryLater
    assert got.detail == "odd"


def test_an_error_of_a_later_release_is_one_to_retry() -> None:
    got = error_of(Failure(kind="of_later", detail="new trouble", retry_after_seconds=9.0))
    assert type(got) is RetryLater
    assert vars(got) == {"detail": "new trouble", "retry_after_seconds": 9.0}


def test_a_detail_is_cut_at_its_limit() -> None:
    assert len(answered(errors.Conflict("x" * 10_000)).detail) == DETAIL_LENGTH_MAX
