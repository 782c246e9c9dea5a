"""Converts specs of topics and groups to JSON for the stores, and back.

The JSON contains all fields except the name, which is the key in the store.

If a stored spec does not contain a field that a newer popgate has added, the field gets its default value. So a stored
spec can still be read after an upgrade.
"""

from dataclasses import asdict
from typing import Any

import orjson

from popgate.domain.names import Subscription, TopicName
from popgate.domain.topics import ConsumeMode, Drain, GroupSpec, Policy, RetryPolicy, TopicSpec

Fields = dict[str, Any]


def topic_json(spec: TopicSpec) -> str:
    return orjson.dumps(_fields(spec, without="topic")).decode()


def group_json(spec: GroupSpec) -> str:
    """Return the JSON of ``spec``. If ``min_replicas`` is not set, leave it out.

    Older versions of popgate can't read this field.
    """
    fields = _fields(spec, without="subscription")
    if spec.policy.min_replicas is None:
        del fields["policy"]["min_replicas"]
    return orjson.dumps(fields).decode()


def read_topic(name: str, text: str | bytes) -> TopicSpec:
    fields: Fields = orjson.loads(text)
    fields["adopted"] = tuple(fields.get("adopted", ()))
    return TopicSpec(topic=TopicName(name), **fields)


def read_group(subscription: Subscription, text: str | bytes) -> GroupSpec:
    fields: Fields = orjson.loads(text)
    policy: Fields = fields.pop("policy", {})
    policy["retry"] = RetryPolicy(**policy.get("retry", {}))
    fields["mode"] = ConsumeMode(fields.get("mode", ConsumeMode.POP))
    drain = fields.get("drain")
    if drain is not None:
        fields["drain"] = Drain(to=ConsumeMode(drain["to"]), ends_at=drain["ends_at"])
    return GroupSpec(subscription=subscription, policy=Policy(**policy), **fields)


def _fields(spec: TopicSpec | GroupSpec, *, without: str) -> Fields:
    fields = asdict(spec)
    del fields[without]
    return fields
