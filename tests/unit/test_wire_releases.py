"""Proxies of different releases understand each other.

`releases.earlier_wire` is version 1 as it was released, and never changes, except that it follows renamed domain types.
`releases.next_wire` is a version 2 that no release has.
"""

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given

from popgate.domain.errors import PopgateError, WrongMode
from popgate.domain.names import GroupName, InstanceId, Subscription, TopicName
from popgate.ports.peers import Follow, PeerMessage, PeerOrder, SettleAtOwner
from popgate.wire import version_1
from popgate.wire.codec import CODEC, Codec, Version
from popgate.wire.errors import NotUnderstood
from releases import earlier_wire, next_wire
from unit.wire_messages import exchanges

OLD, NEW = Codec({1: earlier_wire}), Codec({1: version_1, 2: next_wire})
ME = InstanceId("a1")
Exchange = tuple[InstanceId, PeerMessage[Any], Any]


@given(exchanges())
def test_version_1_says_the_same_bytes_as_when_it_was_released_and_reads_the_same_from_them(exchange: Exchange) -> None:
    sender, message, answer = exchange
    said = earlier_wire.encode_message(sender, message)
    assert version_1.encode_message(sender, message) == said
    assert version_1.decode_message(said) == earlier_wire.decode_message(said) == (sender, message)
    answered = earlier_wire.encode_answer(message, answer)
    assert version_1.encode_answer(message, answer) == answered
    assert version_1.decode_answer(message, answered) == earlier_wire.decode_answer(message, answered) == answer


def test_the_cause_of_a_rejection_is_a_field_that_the_earlier_release_skips() -> None:
    order = PeerOrder("handle", None, "bad", error_type="ValueError", error_text="no such order", client="w-7")
    message = SettleAtOwner(subscription=Subscription(TopicName("t"), GroupName("g")), verb="reject", orders=(order,))
    said = version_1.encode_message(ME, message)
    assert version_1.decode_message(said) == (ME, message)
    _, understood = earlier_wire.decode_message(said)
    assert understood == replace(message, orders=(PeerOrder("handle", None, "bad"),))


def failure(codec: Codec, message: PeerMessage[Any], data: bytes) -> PopgateError:
    with pytest.raises(PopgateError) as caught:
        codec.decode_answer(message, data)
    return caught.value


@given(exchanges())
def test_who_speaks_two_versions_is_understood_in_each_and_answers_in_that_in_which_it_was_asked(
    exchange: Exchange,
) -> None:
    sender, message, answer = exchange
    for version, asker in ((1, OLD), (1, NEW), (2, NEW)):
        asked = NEW.decode_message(asker.encode_message(version, sender, message))
        assert asked == (version, sender, message)
        assert asker.decode_answer(message, NEW.encode_answer(version, message, answer)) == answer
        told = failure(asker, message, NEW.encode_error(version, WrongMode("no", mode="pull")))
        assert isinstance(told, WrongMode)
        assert told.mode == "pull"


def test_what_is_not_spoken_is_not_understood_and_named() -> None:
    later = NEW.encode_message(2, ME, Follow())
    assert later != NEW.encode_message(1, ME, Follow())
    for old in (OLD, CODEC):
        with pytest.raises(NotUnderstood, match=r"this proxy does not speak version 2 of the peer protocol, only 1$"):
            old.decode_message(later)


def test_a_codec_says_which_versions_it_speaks() -> None:
    assert (OLD.protocols, NEW.protocols) == ((1, 1), (1, 2))
    assert Codec(cast("dict[int, Version]", dict.fromkeys((2, 3, 4), next_wire))).protocols == (2, 4)
    with pytest.raises(AssertionError, match="range"):
        Codec({1: version_1, 3: next_wire})
