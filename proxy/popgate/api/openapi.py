"""Completes the OpenAPI description of the HTTP API. It is derived from the code, so that it stays correct.

FastAPI describes the control plane. This module adds the data plane and the examples. ``openapi_operations`` describes
the data plane's operations, ``openapi_schemas`` their bodies, and ``openapi_errors`` the errors of both planes.
"""

from collections.abc import Mapping
from typing import Any

from popgate.api.formats import JSON
from popgate.api.openapi_operations import data_plane_paths
from popgate.api.openapi_schemas import REF, data_plane_schemas

DESCRIPTION = """Pop-mode consumption proxy for RabbitMQ: lease, settle and redeliver messages over HTTP.

Any request may be refused before it reaches an operation:

- 401 `unauthenticated`: the proxy requires a key or a token, and this request has no valid one
- 403 `forbidden`: the caller lacks a permission; the answer names the missing `action`
- 403 `host_not_allowed`: the `Host` header names no host of this proxy
- 408 `request_timeout`: its head or its body came too slowly
- 414, 431 `head_too_large`: its path or its headers are too long
- 415 `unsupported_media_type`: it comes from a page of another site, and names no content type that popgate reads
- 429 `limit_exceeded`: the caller uses as much as one of its limits allows
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
    "LogLevelChange": {"level": "debug", "seconds": 300},
    "PolicyChange": {"invisibility_seconds": 60, "max_deliveries": 5},
    "RedriveRequest": {"filter": {"reason": "timeout"}, "max_messages": 10, "wait_seconds": 5},
    "PurgeRequest": {"filter": {"cause": "rejected"}, "older_than_seconds": 604_800},
}
"""Example requests for /docs, by the name of their schema. /docs would otherwise generate examples that have all
fields, and the server would refuse these."""


def complete(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the data plane and the examples to FastAPI's schema, replace its summaries, and remove FastAPI's errors."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            _summarize(operation)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    components.update(data_plane_schemas())
    schema["paths"] = {**data_plane_paths(), **schema["paths"]}
    key = "A key (`pg_...`) or a token of the configured OpenID provider. Not needed if the proxy has no keys."
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": key}}
    schema["security"] = [{}, {"key": []}]
    for operations in schema["paths"].values():
        for operation in operations.values():
            _add_example(operation)
    return schema


def _summarize(operation: dict[str, Any]) -> None:
    """Use the first sentence of the description as the summary. FastAPI's summary is the function's name."""
    summary, _, rest = operation.pop("description", operation["summary"]).partition(". ")
    operation["summary"] = summary.removesuffix(".")
    if rest:
        operation["description"] = rest


def _add_example(operation: dict[str, Any]) -> None:
    """Add the example of the request, if there is one. A test fails if one is missing; the description must not."""
    content = operation.get("requestBody", {}).get("content", {}).get(JSON)
    if content is not None:
        shape = content["schema"].get("anyOf", [content["schema"]])[0]
        example = _EXAMPLES.get(shape.get("$ref", "").removeprefix(REF))
        if example is not None:
            content["example"] = example


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
