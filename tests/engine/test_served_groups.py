"""The groups of one topic are found without a look at the groups of all topics."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.engine.catalog.served_groups import ServedGroups
from popgate.runtime.clocks import ManualClock
from support.engines import bodies, open_world

T, U = TopicName("t"), TopicName("u")


async def test_a_publish_does_not_look_through_the_groups_of_all_topics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        await world.create("t")
        await world.create("u")

        def looks_at_all(_: ServedGroups) -> Iterator[Subscription]:
            raise AssertionError("it looks at all groups")

        with monkeypatch.context() as patched:
            for method in ("__iter__", "items", "keys", "values"):
                patched.setattr(ServedGroups, method, looks_at_all)
            await world.publish("t", "a")
        assert bodies(await world.pop("t")) == ["a"]


async def test_the_groups_of_a_topic_are_those_that_are_served(tmp_path: Path) -> None:
    async with open_world(tmp_path, clock=ManualClock()) as world:
        topics = world.engine.topics
        for topic, group in (("t", "a"), ("u", "a"), ("t", "b")):
            await world.create(topic, group=group)
        assert topics.group_names(T) == ["a", "b"]
        assert topics.groups(T) == [topics.served[Subscription(T, GroupName(group))] for group in ("a", "b")]
        await world.engine.changes.put_topic("t", queues=3, adopt=None)  # replaces its groups
        assert topics.groups(T) == [topics.served[Subscription(T, GroupName(group))] for group in ("a", "b")]
        await world.engine.deletions.delete_group("t", "a")
        assert topics.group_names(T) == ["b"]
        await world.engine.deletions.delete_topic("t")
        assert topics.group_names(T) == []
        assert topics.group_names(U) == ["a"]
