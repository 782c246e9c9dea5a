"""Describes every operation in OpenAPI. The description is derived from the code, so that it stays correct.

FastAPI describes the control plane. This module adds the data plane's paths. Their schemas are derived from the types
that read requests and write answers. Their errors are taken from the table in ``problems``.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import msgspec
from msgspec import Struct

from popgate.api import answers, lock_models, pull_models, requests
from popgate.api.formats import ARROW, JSON, MSGPACK
from popgate.api.problems import CONTENT_TYPE, Problem
from popgate.domain.lease_group import EPOCH_MAX, SLICES_MAX
from popgate.domain.names import NAME_PATTERN, QUEUES_MAX

_REF = "#/components/schemas/"
_OF_MESSAGES = {
    answers.PopAnswer.__name__: answers.PoppedMessage.__name__,
    answers.LeaseGroupMessages.__name__: answers.LeaseGroupMessage.__name__,
    pull_models.PullAnswer.__name__: pull_models.PulledMessage.__name__,
}
"""Maps answers that contain messages to the schema of these messages."""
_PACKED = "Packed"
"""Suffix of a schema's name if MessagePack differs from JSON: in MessagePack, a popped body is raw bytes."""
_ERRORS = {
    400: "invalid_request: a field is missing, unknown or has a wrong value",
    404: "topic_not_found, group_not_found, lease_group_not_found, lock_not_found, dead_letter_not_found, "
    "redrive_not_found",
    409: "conflict, quota_exceeded with the setting, wrong_mode with the current mode, fenced, lease_group_expired, "
    "or lock_lost",
    410: "lease_group_acked: the epoch was acked, for good",
    413: "message_too_large: a message, or the request as a whole",
    415: "unsupported_media_type: the body is compressed, or in a format that is not read here",
    429: "too_many_in_flight: as many messages are leased as max_in_flight allows; too_many_pops: too many pops wait",
    500: "internal_error: a bug of popgate",
    503: "broker_unavailable, state_unavailable, peer_unavailable, lock_held, lock_unavailable, not_ready, "
    "unavailable: the same request may succeed later",
}
DESCRIPTION = """Pop-mode consumption proxy for RabbitMQ: lease, settle and redeliver messages over HTTP.

Any request may be refused before it reaches an operation:

- 403 `host_not_allowed`: the `Host` header names no host of this proxy
- 408 `request_timeout`: its head or its body came too slowly
- 414, 431 `head_too_large`: its path or its headers are too long
- 415 `unsupported_media_type`: it comes from a page of another site, and names no content type that popgate reads
- 503 `overloaded`: too many connections are busy, or too many large requests are under way

These answers are problem documents like all others. The connection is closed after 408, 414, 431 and 503."""
_RECEIPT_HANDLE = "a receipt_handle as a pop answers it"
_LOCK_TOKEN = "a token as acquire answers it"
_EXAMPLES: Mapping[str, Any] = {
    "PublishRequest": {"messages": [{"body": "Hello, world", "headers": {"kind": "express"}}]},
    "PopRequestBody": {"max_messages": 10, "wait_seconds": 5, "invisibility_seconds": 60},
    "AckRequest": {"receipt_handles": [_RECEIPT_HANDLE]},
    "ReleaseRequest": {"entries": [{"receipt_handle": _RECEIPT_HANDLE, "delay_seconds": 5}]},
    "ExtendRequest": {"entries": [{"receipt_handle": _RECEIPT_HANDLE, "invisibility_seconds": 300}]},
    "RejectRequest": {"entries": [{"receipt_handle": _RECEIPT_HANDLE, "reason": "no such customer"}]},
    "LeaseGroupRequest": {"max_messages": 1_000, "slices": 4, "invisibility_seconds": 600},
    "LeaseGroupAckRequest": {"through_epoch": 1},
    "LeaseGroupExtendRequest": {"invisibility_seconds": 600},
    "LeaseGroupReleaseRequest": {"after_epoch": 1},
    "AssignmentRequest": {"client_id": "billing-7", "supports": ["pop", "pull"]},
    "PullRequest": {"client_id": "billing-7", "generation": 1, "max_messages": 10, "wait_seconds": 5},
    "CommitRequest": {"client_id": "billing-7", "generation": 1, "receipt_handle": "a receipt_handle of a pull"},
    "LockChange": {"kind": "semaphore", "slots": 4},
    "LockAcquireRequest": {"holder": "billing-7", "ttl_seconds": 30, "wait_seconds": 5},
    "LockTokenRequest": {"token": _LOCK_TOKEN},
    "LockRenewRequest": {"token": _LOCK_TOKEN, "ttl_seconds": 30},
    "LockForceReleaseRequest": {"holder": "billing-7"},
    "TopicChange": {"queues": 4},
    "ConsumeModeChange": {"mode": "pull", "drain_timeout_seconds": 60, "dry_run": True},
    "PolicyChange": {"invisibility_seconds": 60, "max_deliveries": 5},
    "RedriveRequest": {"max_messages": 10, "wait_seconds": 5},
    "PurgeRequest": {"older_than_seconds": 604_800},
}
"""Example requests for /docs, by the name of the schema. The server would refuse a generated example, which has all
fields."""
_LOCK_KINDS: Sequence[Any] = [
    {"properties": {"kind": {"const": "mutex"}, "slots": {"const": 1}, "enabled": {"const": True}}},
    {"properties": {"kind": {"const": "persistent_mutex"}, "slots": {"const": 1}}},
    {"properties": {"kind": {"const": "semaphore"}}},
]
"""The slots and states that each kind of lock accepts."""
_MAY_BE_EMPTY = frozenset({"PopRequestBody", "LockForceReleaseRequest"})
"""The requests whose body may be absent, which means the same as a body without fields."""
_SUBSCRIPTION = "/v1/topics/{topic}/groups/{group}"
_NAME = {"type": "string", "pattern": NAME_PATTERN}
_TAG = "data plane"


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of these errors, in the form that FastAPI takes as ``responses``."""
    return {status: _problem_response(status) for status in (*statuses, 500)}


def complete(schema: dict[str, Any]) -> dict[str, Any]:
    """Complete FastAPI's schema: add the data plane and examples, and replace FastAPI's texts and errors with
    popgate's."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            _summarize(operation)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    components.update(_components())
    schema["paths"] = {**_paths(), **schema["paths"]}
    for operations in schema["paths"].values():
        for operation in operations.values():
            _add_example(operation)
    return schema


def _summarize(operation: dict[str, Any]) -> None:
    """Use the description's first sentence as the summary, instead of the function's name."""
    summary, _, rest = operation.pop("description").partition(". ")
    operation["summary"] = summary.removesuffix(".")
    if rest:
        operation["description"] = rest


def _add_example(operation: dict[str, Any]) -> None:
    if "requestBody" in operation:
        content = operation["requestBody"]["content"][JSON]
        shape = content["schema"].get("anyOf", [content["schema"]])[0]
        content["example"] = _EXAMPLES[shape["$ref"].removeprefix(_REF)]


def allowed_methods(schema: Mapping[str, Any], path: str) -> str:
    """Return the methods of ``path`` as the ``Allow`` header lists them, or an empty text for an unknown path.

    If ``path`` matches one template literally, templates that have a parameter at the same position are ignored.
    """
    parts = path.split("/")
    methods: set[str] = set()
    fewest = len(parts)
    for template, operations in schema["paths"].items():
        pieces = template.split("/")
        if len(pieces) != len(parts):
            continue
        if any(piece != part and not piece.startswith("{") for piece, part in zip(pieces, parts, strict=True)):
            continue
        names = sum(piece.startswith("{") for piece in pieces)
        if names < fewest:
            fewest, methods = names, set[str]()
        if names == fewest:
            methods.update(method.upper() for method in operations)
    return ", ".join(sorted(methods))


# -- shapes -----------------------------------------------------------------------------------------------------------


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


def _components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_TYPES, ref_template=_REF + "{name}")
    for name in ("PublishEntry", *_OF_MESSAGES.values()):
        components[name]["oneOf"] = [{"required": ["body"]}, {"required": ["body_base64"]}]
    # JSON reads these fields as floats, so that 2.0 is accepted as a whole number.
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
    text = msgspec.json.encode(schema).replace(f'"{_REF}{old}"'.encode(), f'"{_REF}{new}"'.encode())
    return msgspec.json.decode(text, type=dict[str, Any])


# -- operations -------------------------------------------------------------------------------------------------------


def _paths() -> dict[str, Any]:
    topic = [{"name": "topic", "in": "path", "required": True, "schema": _NAME}]
    both = [*topic, {"name": "group", "in": "path", "required": True, "schema": _NAME}]

    def on_group(name: str, summary: str, request: str, answer: str, *errors: int) -> dict[str, Any]:
        return {"post": _operation(name, summary, both, _content(answer), errors, request=request)}

    settled = "SettleAnswer"
    return {
        "/v1/topics/{topic}/messages": {
            "post": _operation(
                "publish",
                "Publish messages; each is on stable storage when its result says published",
                topic,
                _content("PublishAnswer"),
                (404, 409),
                request="PublishRequest",
            )
        },
        f"{_SUBSCRIPTION}/pop": on_group(
            "pop",
            "Lease messages: no other client gets them until the lease ends",
            "PopRequestBody",
            "PopAnswer",
            404,
            409,
            429,
        ),
        f"{_SUBSCRIPTION}/ack": on_group(
            "ack", "Settle leases: acked messages never come again", "AckRequest", settled, 404
        ),
        f"{_SUBSCRIPTION}/release": on_group(
            "release", "Give leases back: the messages become visible again", "ReleaseRequest", settled, 404
        ),
        f"{_SUBSCRIPTION}/extend": on_group("extend", "Set new ends of leases", "ExtendRequest", settled, 404),
        f"{_SUBSCRIPTION}/reject": on_group(
            "reject", "Move messages to the dead-letter queue", "RejectRequest", settled, 404
        ),
        _SUBSCRIPTION: {
            "get": _operation(
                "state", "The counts, queues and policy of a subscription", both, _content("SubscriptionState"), (404,)
            )
        },
        **_lease_group_paths(both),
        **_pull_paths(both),
        **_lock_paths(),
    }


def _pull_paths(both: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    client = [*both, {"name": "client_id", "in": "path", "required": True, "schema": _NAME}]
    number = {"type": "integer", "minimum": 0, "maximum": QUEUES_MAX - 1}
    queue = [*both, {"name": "queue", "in": "path", "required": True, "schema": number}]
    on_queue = (
        ("pull", "Get the next messages of an assigned queue, in order", "PullRequest", "PullAnswer", (429,)),
        ("commit", "Settle a pulled message and all before it", "CommitRequest", "CommitAnswer", ()),
    )
    return {
        f"{_SUBSCRIPTION}/assignment": {
            "post": _operation(
                "assign",
                "Register a pull client, or show that it lives, and learn which queues are its own",
                both,
                _content("AssignmentAnswer"),
                (404, 409),
                request="AssignmentRequest",
            )
        },
        f"{_SUBSCRIPTION}/assignment/{{client_id}}": {
            "delete": _operation(
                "leaveAssignment",
                "Leave: the client's queues go to others, and what it has not committed returns",
                client,
                _content("AssignmentLeft"),
                (404,),
            )
        },
        **{
            f"{_SUBSCRIPTION}/queues/{{queue}}/{verb}": {
                "post": _operation(verb, summary, queue, _content(answer), (404, 409, *errors), request=request)
            }
            for verb, summary, request, answer, errors in on_queue
        },
    }


def _lock_paths() -> dict[str, Any]:
    path = "/v1/locks/{name}"
    name = [{"name": "name", "in": "path", "required": True, "schema": _NAME}]
    on_lock = (
        ("acquire", "Hold a lock for a while, waiting in line for it", "LockAcquireRequest", "LockAcquired", (409,)),
        ("verify", "Make sure that a lock is still held", "LockTokenRequest", "LockHeldAnswer", (409,)),
        ("renew", "Hold a lock for longer", "LockRenewRequest", "LockHeldAnswer", (409,)),
        ("release", "Let a lock go", "LockTokenRequest", "LockReleased", ()),
        ("force-release", "Take a lock away", "LockForceReleaseRequest", "LockForceReleased", ()),
    )
    return {
        "/v1/locks": {"get": _operation("listLocks", "All locks", [], _content("LockList"), ())},
        path: {
            "get": _operation(
                "getLock", "A lock, who holds it, and how many wait", name, _content("LockAnswer"), (404,)
            ),
            "put": _operation(
                "putLock",
                "Make a lock, or change how many may hold it",
                name,
                _content("LockAnswer"),
                (409,),
                request="LockChange",
            ),
            "delete": _operation(
                "deleteLock", "Delete a lock; who holds it loses it", name, _content("LockDeleted"), (404,)
            ),
        },
        **{
            f"{path}/{verb}": {
                "post": _operation(
                    f"{verb.partition('-')[0]}Lock", summary, name, _content(answer), (404, *errors), request=request
                )
            }
            for verb, summary, request, answer, errors in on_lock
        },
    }


def _lease_group_paths(both: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    stream = [*both, {"name": "stream", "in": "path", "required": True, "schema": _NAME}]
    whole = {"type": "integer", "minimum": 0}
    epoch = [*stream, {"name": "epoch", "in": "path", "required": True, "schema": {**whole, "maximum": EPOCH_MAX}}]
    number = {"name": "slice", "in": "query", "schema": {**whole, "maximum": SLICES_MAX - 1, "default": 0}}
    narrowed = {"name": "stream", "in": "query", "description": "only those of one stream", "schema": _NAME}
    groups = f"{_SUBSCRIPTION}/lease-groups"
    messages = _content("LeaseGroupMessages")
    messages[ARROW] = {
        "schema": {"description": "an Arrow IPC stream: one row a message", "contentMediaType": ARROW, "type": "string"}
    }
    on_stream = (
        ("ack", "Settle every lease group through an epoch; those epochs are gone for good", "Ack", "sAcked"),
        ("extend", "Set new ends of the leases of every lease group of a stream", "Extend", "sExtended"),
        ("release", "Give back the messages of later lease groups, and forget these", "Release", "sReleased"),
    )
    return {
        groups: {
            "get": _operation(
                "listLeaseGroups",
                "The lease groups that are not acked",
                [*both, narrowed],
                _content("LeaseGroupList"),
                (404,),
            )
        },
        f"{groups}/{{stream}}/{{epoch}}": {
            "put": _operation(
                "putLeaseGroup",
                "Lease a batch with a frozen membership, or lease the messages of an existing one again",
                epoch,
                _content("LeaseGroupAnswer"),
                (404, 409, 410, 429),
                request="LeaseGroupRequest",
            )
        },
        f"{groups}/{{stream}}/{{epoch}}/messages": {
            "get": _operation(
                "readLeaseGroup",
                "Read a slice of a lease group: the same messages in the same order each time",
                [*epoch, number],
                messages,
                (404, 409, 410),
            )
        },
        **{
            f"{groups}/{{stream}}/{verb}": {
                "post": _operation(
                    f"{verb}LeaseGroups",
                    summary,
                    stream,
                    _content(f"LeaseGroup{answer}"),
                    (404,),
                    request=f"LeaseGroup{request}Request",
                )
            }
            for verb, summary, request, answer in on_stream
        },
    }


def _operation(
    name: str,
    summary: str,
    parameters: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    errors: Sequence[int],
    *,
    request: str | None = None,
) -> dict[str, Any]:
    responses: dict[str, Any] = {
        "200": {"description": "Done; where there are results, they say what became of each entry", "content": answer}
    }
    for status in sorted({*errors, 400, 413, 415, 500, 503}):
        responses[str(status)] = _problem_response(status)
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "tags": [_TAG],
        "parameters": list(parameters),
        "responses": responses,
    }
    if request is not None:
        operation["requestBody"] = {"content": _content(request), "required": request not in _MAY_BE_EMPTY}
    return operation


def _content(name: str) -> dict[str, Any]:
    packed = name + _PACKED if name in _OF_MESSAGES else name
    return {JSON: {"schema": {"$ref": _REF + name}}, MSGPACK: {"schema": {"$ref": _REF + packed}}}


def _problem_response(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _ERRORS[status],
        "content": {CONTENT_TYPE.decode(): {"schema": {"$ref": f"{_REF}Problem"}}},
    }
    if status in (429, 503):
        schema = {"type": "integer", "minimum": 1}
        response["headers"] = {"Retry-After": {"description": "seconds", "required": True, "schema": schema}}
    return response
