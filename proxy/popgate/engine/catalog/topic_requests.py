"""Checks a request to create or change a topic before anything is written, and logs what was written."""

import logging
from collections.abc import Iterable, Sequence

from popgate.domain.errors import Conflict, InvalidRequest
from popgate.domain.names import QUEUES_MAX, BrokerQueue, TopicName
from popgate.domain.topics import TopicSpec
from popgate.ports.broker import Broker

_log = logging.getLogger(__name__)

RESERVED = frozenset({"consumer", "guard", "presence"})
"""Names that no new topic may have: the topic's queues or its exchange could have the names of popgate's own ones, such
as ``popgate:consumer:Q``, which holds the adopted queue Q."""


def check_new_topic(topic: TopicName) -> None:
    """Check the name of a topic that does not exist yet. Raises: InvalidRequest."""
    if topic in RESERVED:
        raise InvalidRequest(f"topic: popgate uses the name {topic!r} itself; use another one", field="topic")


def log_topic(before: TopicSpec | None, spec: TopicSpec) -> None:
    """Log that a topic was created (``before`` is None), or that the number of its queues was changed."""
    fields = {"topic": spec.topic, "queues": spec.queue_count, **({"adopted": spec.adopted} if spec.adopted else {})}
    if before is None:
        _log.info("a topic was created", extra=fields)
    elif before.queue_count != spec.queue_count:
        fields["before"] = before.queue_count
        _log.info("the number of queues of a topic was changed", extra=fields)


def asked_topic(
    topic: TopicName, queues: int | None, adopt: Sequence[str] | None, *, unique_message_ids: bool
) -> TopicSpec:
    """Return the topic spec that a request to create or change a topic asks for. Raises: InvalidRequest."""
    if (queues is None) == (adopt is None):
        raise InvalidRequest("give either queues (a number) or adopt (a list of existing queues)", field="queues")
    if queues is not None and not 1 <= queues <= QUEUES_MAX:
        raise InvalidRequest(f"queues must be 1 to {QUEUES_MAX}", field="queues")
    if adopt is not None:
        return TopicSpec(
            topic=topic,
            queue_count=len(adopt),
            adopted=tuple(BrokerQueue(queue) for queue in adopt),
            unique_message_ids=unique_message_ids,
        )
    return TopicSpec(topic=topic, queue_count=queues or 1)


async def check_adoption(spec: TopicSpec, present: Iterable[TopicSpec], broker: Broker) -> list[str]:
    """Check the existing queues that a new topic adopts. Return warnings for the administrator.

    ``present``: the existing topics. Raises: Conflict, InvalidRequest, BrokerUnavailable.
    """
    if not spec.adopted:
        return []
    if not broker.capabilities.adopts_queues:
        raise Conflict("the embedded broker has no foreign queues to adopt; start popgate with --amqp-url")
    taken = {queue for other in present for queue in other.adopted}
    warnings: list[str] = []
    for position, queue in enumerate(spec.adopted):
        field = f"adopt[{position}]"
        if queue in spec.adopted[:position]:
            raise InvalidRequest(f"queue {queue!r} is named twice", field=field)
        if queue.startswith("popgate:"):
            raise InvalidRequest(f"queue {queue!r} is one of popgate's own queues", field=field)
        if queue in taken:
            raise Conflict(f"queue {queue!r} is already adopted by another topic")
        facts = await broker.inspect(queue)
        if not facts.exists:
            raise Conflict(
                f"queue {queue!r} does not exist; adopt existing queues, or create a topic with queues of its own"
            )
        if facts.kind == "stream":
            raise Conflict(f"queue {queue!r} is a stream; popgate adopts classic and quorum queues")
        if facts.consumers:
            raise Conflict(
                f"queue {queue!r} has {facts.consumers} consumer(s); stop them first, because popgate must be the "
                "only consumer (rabbitmqctl list_consumers shows them)"
            )
        warnings.extend(facts.warnings)
    return warnings
