"""Topics and groups as JSON, as the stores keep them: all but the name, under which it stands.

A field that a newer popgate adds gets its default here, so that what was stored survives an upgrade.
"""

from dataclasses import asdict
from typing import Any

import orjson

from popgate.domain.names import Subscription, TopicName
from popgate.domain.topics import ConsumeMode, Drain, GroupSpec, Policy, RetryPolicy, TopicSpec

Fields = dict[str, Any]


def topic_json(spec: TopicSpec) -> str:
    return _json(spec, without="topic")


def group_json(spec: GroupSpec) -> str:
    return _json(spec, without="subscription")


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


def _json(spec: TopicSpec | GroupSpec, *, without: str) -> str:
    fields = asdict(spec)
    del fields[without]
    return orjson.dumps(fields).decode()
