"""What is created, deleted and switched, and which queues a proxy owns, is in the log, in few lines."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from popgate.domain.names import GroupName, TopicName
from popgate.journal.event_log import GROUPS_MAX, EventLog
from popgate.ports.journal import EventKind

LOGGER = "popgate.journal.event_log"


class Scene:
    """An event log, and what it has scheduled."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.log = EventLog(lambda _seconds, call: self.due.append(call))

    def note(self, kind: EventKind, topic: str = "t", group: str | None = "g", queue: int | None = None) -> None:
        name = None if group is None else GroupName(group)
        self.log.note(kind, TopicName(topic), 0.0, group=name, queue_index=queue, detail="pull")

    def elapse(self) -> None:
        due, self.due = self.due, []
        for call in due:
            call()


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    caplog.set_level(logging.INFO, LOGGER)
    return Scene()


def lines(caplog: pytest.LogCaptureFixture, *fields: str) -> list[tuple[Any, ...]]:
    return [(one.getMessage(), *(getattr(one, field, None) for field in fields)) for one in caplog.records]


def test_a_change_of_a_topic_or_group_is_logged_at_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.note(EventKind.GROUP_CREATED)
    scene.note(EventKind.MODE_CHANGED)
    scene.note(EventKind.GROUP_DELETED)
    scene.note(EventKind.TOPIC_DELETED, group=None)
    scene.note(EventKind.JOURNAL_STARTED)
    assert lines(caplog, "topic", "group", "mode") == [
        ("a group was created", "t", "g", None),
        ("the consume mode of a group was switched", "t", "g", "pull"),
        ("a group was deleted", "t", "g", None),
        ("a topic was deleted", "t", None, None),
    ]


def test_the_queues_of_a_group_move_in_one_line(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for queue in (2, 0, 1):
        scene.note(EventKind.QUEUE_CLAIMED, queue=queue)
    scene.note(EventKind.QUEUE_RELEASED, group="other", queue=3)
    assert not caplog.records
    scene.elapse()
    scene.note(EventKind.QUEUE_RELEASED, queue=1)
    scene.elapse()
    assert lines(caplog, "topic", "group", "queues") == [
        ("this proxy owns queues of a group now", "t", "g", [0, 1, 2]),
        ("this proxy no longer owns queues of a group", "t", "other", [3]),
        ("this proxy no longer owns queues of a group", "t", "g", [1]),
    ]


def test_a_queue_that_comes_and_goes_counts_as_it_ends(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for kind in (EventKind.QUEUE_CLAIMED, EventKind.QUEUE_RELEASED, EventKind.QUEUE_CLAIMED):
        scene.note(kind, queue=0)
    scene.elapse()
    assert lines(caplog, "queues") == [("this proxy owns queues of a group now", [0])]


def test_the_queues_of_many_groups_move_in_one_line(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(GROUPS_MAX + 1):
        for queue in range(4):
            scene.note(EventKind.QUEUE_CLAIMED, topic=f"t{number}", queue=queue)
    scene.elapse()
    assert lines(caplog, "groups", "queues") == [
        ("this proxy owns queues of many groups now", GROUPS_MAX + 1, 4 * (GROUPS_MAX + 1))
    ]
