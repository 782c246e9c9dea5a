"""Messages between proxies survive a round trip, in bytes that proxies of other releases can read, too."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.errors import PopgateError
from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.lease_group import GroupKey
from popgate.domain.message import Message
from popgate.domain.names import (
    BrokerQueue,
    CopyId,
    GroupName,
    InstanceId,
    LeaseId,
    StreamName,
    Subscription,
    TopicName,
)
from popgate.ports import peers
from popgate.ports.peers import MESSAGES, PeerMessage
from popgate.wire.codec import CODEC
from popgate.wire.errors import NotUnderstood
from popgate.wire.version_1 import fields
from popgate.wire.version_1.kinds import KINDS
from unit.wire_messages import exchanges, values

ME = InstanceId("a1")
SUBSCRIPTION = Subscription(TopicName("t"), GroupName("g"))
QUEUE, COPY, LEASE = BrokerQueue("q"), CopyId("c"), LeaseId("l")
RECORD = LeaseRecord(
    RecordState.MOVING, LEASE, 4.5, 2, 1.5, 2.5, 7, 2.25, BrokerQueue("dead"), CopyId("d"), "too often"
)
LEARNED = peers.LearnedRecord(QUEUE, COPY, RECORD, 2.0)
HELD = peers.QueueCounts(3, 5, 8, 13, 21, 34, 55, True, False, 89.5)
MESSAGE = Message(COPY, "m", b"\x00\xff", {"n": 1, "list": [True, None, "x"]}, "k", 1.5, 2.5, None)

EXAMPLES: list[tuple[PeerMessage[Any], Any]] = [
    (peers.Learned(records=(LEARNED,)), None),
    (peers.Wanted(subscription=SUBSCRIPTION, seconds=20.5, since=9), True),
    (peers.Available(subscription=SUBSCRIPTION), None),
    (
        peers.LeaseForGroup(
            subscription=SUBSCRIPTION,
            key=GroupKey(SUBSCRIPTION, StreamName("s"), 2**63 - 1),
            builder="b",
            lease_id=LEASE,
            count=100,
            seconds=30.5,
        ),
        99,
    ),
    (peers.Fetch(subscription=SUBSCRIPTION, leases=(LEARNED,)), [MESSAGE, None]),
    (peers.CountMessages(subscription=SUBSCRIPTION), [HELD]),
    (
        peers.SettleAtOwner(
            subscription=SUBSCRIPTION, verb="reject", orders=(peers.PeerOrder("receipt", None, "bad"),)
        ),
        [peers.PeerResult("extended", 12.5), peers.PeerResult("expired", None)],
    ),
    (peers.PurgeAtOwner(subscription=SUBSCRIPTION), peers.PurgeResult(7, True)),
    (peers.Follow(), None),
]
"""One of every kind, with its answer. Version 1 was released with these bytes: never change them."""

GOLDEN: dict[str, tuple[str, str]] = {
    "learned": (
        (
            "83a776657273696f6e01a673656e646572a26131a76d65737361676582a474797065a76c6561726e6564a77265636f726473"
            "9184a57175657565a171a7636f70795f6964a163a67265636f72648ba57374617465a66d6f76696e67a86c656173655f6964"
            "a16caa76697369626c655f6174cb4012000000000000ae64656c69766572795f636f756e7402b266697273745f64656c6976"
            "657265645f6174cb3ff8000000000000aa6368616e6765645f6174cb4004000000000000a565706f636807a96c6561736564"
            "5f6174cb4002000000000000a6746172676574a464656164ae7461726765745f636f70795f6964a164a6726561736f6ea974"
            "6f6f206f6674656eb172656d61696e696e675f7365636f6e6473cb4000000000000000"
        ),
        ("82a776657273696f6e01a6616e73776572c0"),
    ),
    "wanted": (
        (
            "83a776657273696f6e01a673656e646572a26131a76d65737361676584a474797065a677616e746564ac7375627363726970"
            "74696f6e82a5746f706963a174a567726f7570a167a77365636f6e6473cb4034800000000000a573696e636509"
        ),
        ("82a776657273696f6e01a6616e73776572c3"),
    ),
    "available": (
        (
            "83a776657273696f6e01a673656e646572a26131a76d65737361676582a474797065a9617661696c61626c65ac7375627363"
            "72697074696f6e82a5746f706963a174a567726f7570a167"
        ),
        ("82a776657273696f6e01a6616e73776572c0"),
    ),
    "lease_for_group": (
        (
            "83a776657273696f6e01a673656e646572a26131a76d65737361676587a474797065af6c656173655f666f725f67726f7570"
            "ac737562736372697074696f6e82a5746f706963a174a567726f7570a167a36b657983ac737562736372697074696f6e82a5"
            "746f706963a174a567726f7570a167a673747265616da173a565706f6368cf7fffffffffffffffa76275696c646572a162a8"
            "6c656173655f6964a16ca5636f756e7464a77365636f6e6473cb403e800000000000"
        ),
        ("82a776657273696f6e01a6616e7377657263"),
    ),
    "fetch": (
        (
            "83a776657273696f6e01a673656e646572a26131a76d65737361676583a474797065a56665746368ac737562736372697074"
            "696f6e82a5746f706963a174a567726f7570a167a66c65617365739184a57175657565a171a7636f70795f6964a163a67265"
            "636f72648ba57374617465a66d6f76696e67a86c656173655f6964a16caa76697369626c655f6174cb4012000000000000ae"
            "64656c69766572795f636f756e7402b266697273745f64656c6976657265645f6174cb3ff8000000000000aa6368616e6765"
            "645f6174cb4004000000000000a565706f636807a96c65617365645f6174cb4002000000000000a6746172676574a4646561"
            "64ae7461726765745f636f70795f6964a164a6726561736f6ea9746f6f206f6674656eb172656d61696e696e675f7365636f"
            "6e6473cb4000000000000000"
        ),
        (
            "82a776657273696f6e01a6616e737765729288a7636f70795f6964a163aa6d6573736167655f6964a16da4626f6479c40200"
            "ffa76865616465727382a16e01a46c69737493c3c0a178ac6f72646572696e675f6b6579a16bac7075626c69736865645f61"
            "74cb3ff8000000000000aa76697369626c655f6174cb4004000000000000aa657870697265735f6174c0c0"
        ),
    ),
    "count_held": (
        (
            "83a776657273696f6e01a673656e646572a26131a76d65737361676582a474797065aa636f756e745f68656c64ac73756273"
            "6372697074696f6e82a5746f706963a174a567726f7570a167"
        ),
        (
            "82a776657273696f6e01a6616e73776572918aa66e756d62657203a5726561647905a9696e5f666c6967687408a777616974"
            "696e670da7626c6f636b656415a961745f62726f6b657222a9646561645f68656c6437a969735f706175736564c3a769735f"
            "6f70656ec2a96f6c646573745f6174cb4056600000000000"
        ),
    ),
    "settle": (
        (
            "83a776657273696f6e01a673656e646572a26131a76d65737361676584a474797065a6736574746c65ac7375627363726970"
            "74696f6e82a5746f706963a174a567726f7570a167a476657262a672656a656374a66f72646572739183ae72656365697074"
            "5f68616e646c65a772656365697074a77365636f6e6473c0a6726561736f6ea3626164"
        ),
        (
            "82a776657273696f6e01a6616e737765729282a6737461747573a8657874656e646564af696e76697369626c655f756e7469"
            "6ccb402900000000000082a6737461747573a765787069726564af696e76697369626c655f756e74696cc0"
        ),
    ),
    "purge": (
        (
            "83a776657273696f6e01a673656e646572a26131a76d65737361676582a474797065a57075726765ac737562736372697074"
            "696f6e82a5746f706963a174a567726f7570a167"
        ),
        ("82a776657273696f6e01a6616e7377657282a670757267656407a8636f6d706c657465c3"),
    ),
    "follow": (
        ("83a776657273696f6e01a673656e646572a26131a76d65737361676581a474797065a6666f6c6c6f77"),
        ("82a776657273696f6e01a6616e73776572c0"),
    ),
}


def name_of(message: PeerMessage[Any]) -> str:
    return next(name for name, family in MESSAGES.items() if family is type(message))


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message, _ in EXAMPLES} == set(MESSAGES.values()) == set(KINDS)


@pytest.mark.parametrize(("message", "answer"), EXAMPLES, ids=GOLDEN)
def test_version_1_is_written_in_the_bytes_with_which_it_was_released(message: PeerMessage[Any], answer: Any) -> None:
    said, answered = GOLDEN[name_of(message)]
    assert CODEC.encode_message(1, ME, message).hex() == said
    assert CODEC.encode_answer(1, message, answer).hex() == answered
    assert CODEC.decode_message(bytes.fromhex(said)) == (1, ME, message)
    assert CODEC.decode_answer(message, bytes.fromhex(answered)) == answer


def test_the_names_on_the_wire_are_those_of_the_port() -> None:
    tags = {wire.__struct_config__.tag: wire for wire in get_args(fields.MessageOnWire)}
    assert {name: KINDS[family].wire_type for name, family in MESSAGES.items()} == tags


FLAT_TWINS = {
    Subscription: fields.SubscriptionWire,
    LeaseRecord: fields.RecordWire,
    peers.LearnedRecord: fields.LearnedRecordWire,
    GroupKey: fields.GroupKeyWire,
    peers.PeerOrder: fields.OrderWire,
    Message: fields.MessageWire,
    peers.QueueCounts: fields.HeldWire,
    peers.PeerResult: fields.ResultWire,
    peers.PurgeResult: fields.PurgedWire,
}


@pytest.mark.parametrize("twin", FLAT_TWINS.items(), ids=lambda twin: twin[0].__name__)
def test_what_is_written_by_place_has_the_same_fields_in_the_same_order(twin: tuple[Any, Any]) -> None:
    domain, wire = twin
    assert wire.__struct_fields__ == domain._fields


# ---------------------------------------------------------------- round trips


@given(exchanges())
def test_every_message_and_every_answer_comes_back_as_it_was(
    exchange: tuple[InstanceId, PeerMessage[Any], Any],
) -> None:
    sender, message, answer = exchange
    assert CODEC.decode_message(CODEC.encode_message(1, sender, message)) == (1, sender, message)
    assert CODEC.decode_answer(message, CODEC.encode_answer(1, message, answer)) == answer


@given(st.binary(max_size=200) | values.map(msgspec.msgpack.encode))
def test_bytes_that_say_nothing_are_not_understood_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(NotUnderstood):
        CODEC.decode_message(data)
    with pytest.raises(NotUnderstood):
        CODEC.decode_answer(EXAMPLES[0][0], data)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: name_of(example[0]))
def test_bytes_that_were_cut_off_are_not_understood(example: tuple[PeerMessage[Any], Any]) -> None:
    message, answer = example
    said, answered = CODEC.encode_message(1, ME, message), CODEC.encode_answer(1, message, answer)
    for length in range(len(said)):
        with pytest.raises(NotUnderstood):
            CODEC.decode_message(said[:length])
    for length in range(len(answered)):
        with pytest.raises(NotUnderstood):
            CODEC.decode_answer(message, answered[:length])


# ---------------------------------------------------------------- other releases


def test_what_a_later_release_adds_is_skipped_at_every_level() -> None:
    message, answer = next(example for example in EXAMPLES if isinstance(example[0], peers.Fetch))
    said = msgspec.msgpack.decode(CODEC.encode_message(1, ME, message))
    asked = said["message"]
    answered = msgspec.msgpack.decode(CODEC.encode_answer(1, message, answer))
    for level in (said, asked, asked["subscription"], asked["leases"][0]["record"], answered, answered["answer"][0]):
        level["later"] = {"a": [1]}
    assert CODEC.decode_message(msgspec.msgpack.encode(said)) == (1, ME, message)
    assert CODEC.decode_answer(message, msgspec.msgpack.encode(answered)) == answer


def test_what_an_earlier_release_left_out_has_its_default() -> None:
    said = msgspec.msgpack.decode(CODEC.encode_message(1, ME, peers.Learned(records=(LEARNED,))))
    for name in ("target", "target_copy_id", "reason"):
        del said["message"]["records"][0]["record"][name]
    plain = LEARNED._replace(record=RECORD._replace(target=None, target_copy_id=None, reason=""))
    assert CODEC.decode_message(msgspec.msgpack.encode(said))[2] == peers.Learned(records=(plain,))


@pytest.mark.parametrize("version", [0, 2, -1, 2**40])
def test_a_version_that_is_not_spoken_is_refused_by_its_number(version: int) -> None:
    later = msgspec.msgpack.encode({"version": version, "other": "altogether"})
    refusal = f"this proxy does not speak version {version} of the peer protocol, only 1$"
    with pytest.raises(NotUnderstood, match=refusal):
        CODEC.decode_message(later)
    with pytest.raises(NotUnderstood, match=refusal):
        CODEC.decode_answer(EXAMPLES[0][0], later)
    with pytest.raises(NotUnderstood, match=refusal):
        CODEC.encode_message(version, ME, EXAMPLES[0][0])


def test_what_can_not_be_understood_is_an_error_of_ours() -> None:
    assert issubclass(NotUnderstood, PopgateError)
