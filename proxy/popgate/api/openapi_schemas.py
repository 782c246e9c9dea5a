"""Describes the bodies of the data plane's requests and answers for OpenAPI, using their types."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import msgspec
from msgspec import Struct

from popgate.api import answers, lock_models, pull_models, requests
from popgate.api.formats import JSON, MSGPACK
from popgate.api.problems import Problem

REF = "#/components/schemas/"
_OF_MESSAGES = {
    answers.PopAnswer.__name__: answers.PoppedMessage.__name__,
    answers.LeaseGroupMessages.__name__: answers.LeaseGroupMessage.__name__,
    pull_models.PullAnswer.__name__: pull_models.PulledMessage.__name__,
}
"""Maps the name of each answer that contains messages to the name of the schema of these messages."""
_PACKED = "Packed"
"""Suffix of the name of a schema that is only for MessagePack, in which message bodies are raw bytes."""
_LOCK_KINDS: Sequence[Any] = [
    {"properties": {"kind": {"const": "mutex"}, "slots": {"const": 1}, "enabled": {"const": True}}},
    {"properties": {"kind": {"const": "persistent_mutex"}, "slots": {"const": 1}}},
    {"properties": {"kind": {"const": "semaphore"}}},
]
"""The values of ``slots`` and ``enabled`` that each kind of lock accepts."""
_TYPES: Sequence[type[Struct]] = (
    requests.PublishRequest,
    requests.PopRequestBody,
    requests.AckRequest,
    requests.ReleaseRequest,
    requests.ExtendRequest,
    requests.RejectRequest,
    requests.LeaseGroupRequest,
    requests.LeaseGroupAckRequest,
    requests.LeaseGroupExtendRequest,
    requests.LeaseGroupReleaseRequest,
    pull_models.AssignmentRequest,
    pull_models.PullRequest,
    pull_models.CommitRequest,
    pull_models.AssignmentAnswer,
    pull_models.AssignmentLeft,
    pull_models.PullAnswer,
    pull_models.CommitAnswer,
    lock_models.LockChange,
    lock_models.LockAcquireRequest,
    lock_models.LockTokenRequest,
    lock_models.LockRenewRequest,
    lock_models.LockForceReleaseRequest,
    lock_models.LockAnswer,
    lock_models.LockList,
    lock_models.LockAcquired,
    lock_models.LockHeldAnswer,
    lock_models.LockReleased,
    lock_models.LockForceReleased,
    lock_models.LockDeleted,
    answers.PublishAnswer,
    answers.PopAnswer,
    answers.SettleAnswer,
    answers.SubscriptionState,
    answers.LeaseGroupAnswer,
    answers.LeaseGroupMessages,
    answers.LeaseGroupsAcked,
    answers.LeaseGroupsExtended,
    answers.LeaseGroupsReleased,
    answers.LeaseGroupList,
    Problem,
)
"""The types of the bodies of data plane requests and answers."""


def data_plane_schemas() -> dict[str, Any]:
    """Return the schemas of all bodies, and of the types that these contain, by name."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template=REF + "{name}")
    for name in ("PublishEntry", *_OF_MESSAGES.values()):
        components[name]["oneOf"] = [{"required": ["body"]}, {"required": ["body_base64"]}]
    # The types declare these fields as floats, so that 2.0 is accepted. Only whole numbers are valid.
    components["PopRequestBody"]["properties"]["max_messages"]["type"] = "integer"
    components["PullRequest"]["properties"]["max_messages"]["type"] = "integer"
    for name in ("AssignmentRequest", "PullRequest", "CommitRequest"):
        components[name]["properties"]["generation"]["type"] = "integer"
    for field in ("max_messages", "slices"):
        components["LeaseGroupRequest"]["properties"][field]["type"] = "integer"
    components["LockChange"]["properties"]["slots"]["type"] = "integer"
    components["LockChange"]["oneOf"] = _LOCK_KINDS
    for name, field in (
        ("LeaseGroupAckRequest", "through_epoch"),
        ("LeaseGroupReleaseRequest", "after_epoch"),
        ("LockForceReleaseRequest", "fencing_token"),
    ):
        properties = components[name]["properties"]
        properties[field] = properties[field]["anyOf"][0]
    for name, message in _OF_MESSAGES.items():
        packed = components[message + _PACKED] = deepcopy(components[message])
        packed["title"] += _PACKED
        packed["properties"]["body"] = {
            "description": "the body as raw bytes (bin)",
            "contentMediaType": "application/octet-stream",
        }
        components[name + _PACKED] = _pointing_to(components[name], message, message + _PACKED)
    return components


def _pointing_to(schema: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a copy of ``schema`` in which references to ``old`` point to ``new``."""
    text = msgspec.json.encode(schema).replace(f'"{REF}{old}"'.encode(), f'"{REF}{new}"'.encode())
    return msgspec.json.decode(text, type=dict[str, Any])


def content(name: str) -> dict[str, Any]:
    """Return the OpenAPI content of a body in JSON and in MessagePack. ``name``: the name of the body's schema."""
    packed = name + _PACKED if name in _OF_MESSAGES else name
    return {JSON: {"schema": {"$ref": REF + name}}, MSGPACK: {"schema": {"$ref": REF + packed}}}
