"""Publishing with ids on the embedded broker: messages and what their ids stand for are stored in one step."""

from collections.abc import Sequence

import pytest

from contract.recorder import TOPIC, message
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.publishing import STEP_BYTES_MAX
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.message import Message
from popgate.domain.names import TopicName
from popgate.ports.broker import Outgoing
from popgate.ports.dedup import DedupEntry, Reservation
from unit.stored_broker import Store, store

__all__ = ["store"]

WINDOW_SECONDS = 300.0


def entry(one: Message) -> DedupEntry:
    return DedupEntry(f"id of {one.copy_id}", one.copy_id, one.message_id, 0)


def outgoing(messages: Sequence[Message], topic: TopicName = TOPIC) -> list[Outgoing]:
    return [Outgoing(message=one, topic=topic) for one in messages]


async def reservations(store: Store, entries: Sequence[DedupEntry], topic: TopicName = TOPIC) -> dict[str, Reservation]:
    return await SqliteDedupStore(store.database).reserve(topic, entries, window_seconds=WINDOW_SECONDS)


async def test_new_ids_are_confirmed_with_their_messages(store: Store) -> None:
    messages = [message(b"a"), message(b"b"), message(b"without an id")]
    entries = [entry(one) for one in messages[:2]]
    assert await store.broker.publish_new(TOPIC, outgoing(messages), entries)
    assert await store.ready() == 3
    assert await reservations(store, entries) == {one.dedup_id: Reservation(one, is_confirmed=True) for one in entries}


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_nothing_is_stored_where_one_id_stands_already(store: Store, place: int) -> None:
    messages = [message(b"a"), message(b"b"), message(b"c")]
    entries = [entry(one) for one in messages]
    assert await reservations(store, [entries[place]]) == {}
    assert not await store.broker.publish_new(TOPIC, outgoing(messages), entries)
    assert await store.ready() == 0
    assert await store.stored() == 0
    assert await reservations(store, entries) == {}, "the others are free, and the one is pending for the same copy"
    later = message(b"d")
    assert await store.broker.publish_new(TOPIC, outgoing([later]), [entry(later)]), "positions go on"
    assert await store.ready() == 1


async def test_nothing_is_stored_where_a_message_has_no_queue(store: Store) -> None:
    routed, unrouted = message(b"a"), message(b"b")
    nowhere = TopicName("nowhere")
    both = [*outgoing([routed]), *outgoing([unrouted], nowhere)]
    assert not await store.broker.publish_new(TOPIC, both, [entry(routed), entry(unrouted)])
    assert await store.stored() == 0
    assert await reservations(store, [entry(routed), entry(unrouted)]) == {}


async def test_nothing_is_stored_on_a_disk_that_fails(store: Store) -> None:
    one = message(b"a")
    await store.fail(failing=True)
    with pytest.raises(BrokerUnavailable):
        await store.broker.publish_new(TOPIC, outgoing([one]), [entry(one)])
    await store.fail(failing=False)
    assert await reservations(store, [entry(one)]) == {}
    assert await store.ready() == 0


async def test_nothing_is_stored_in_one_step_that_is_too_large_for_it(store: Store) -> None:
    """The caller then reserves the ids, publishes the messages and confirms the ids, as with RabbitMQ."""
    messages = [message(bytes(STEP_BYTES_MAX)), message(b"b")]
    assert not await store.broker.publish_new(TOPIC, outgoing(messages), [entry(one) for one in messages])
    assert await store.stored() == 0
