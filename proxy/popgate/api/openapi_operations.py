"""Describes the data plane's operations for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Any

from popgate.api.formats import ARROW
from popgate.api.openapi_errors import problem_response
from popgate.api.openapi_schemas import content
from popgate.domain.lease_group import EPOCH_MAX, SLICES_MAX
from popgate.domain.names import NAME_PATTERN, QUEUES_MAX

_MAY_BE_EMPTY = frozenset({"PopRequestBody", "LockForceReleaseRequest"})
"""The names of the requests whose body may be absent. An absent body means the same as a body without fields."""
_SUBSCRIPTION = "/v1/topics/{topic}/groups/{group}"
_NAME = {"type": "string", "pattern": NAME_PATTERN}
_TAG = "data plane"


def data_plane_paths() -> dict[str, Any]:
    """Return the OpenAPI operations of the data plane, by path and method."""
    topic = [{"name": "topic", "in": "path", "required": True, "schema": _NAME}]
    both = [*topic, {"name": "group", "in": "path", "required": True, "schema": _NAME}]

    def on_group(name: str, summary: str, request: str, answer: str, *errors: int) -> dict[str, Any]:
        return {"post": _operation(name, summary, both, content(answer), errors, request=request)}

    settled = "SettleAnswer"
    return {
        "/v1/topics/{topic}/messages": {
            "post": _operation(
                "publish",
                "Publish messages; each is on stable storage when its result says published",
                topic,
                content("PublishAnswer"),
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
                "state", "The counts, queues and policy of a subscription", both, content("SubscriptionState"), (404,)
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
                content("AssignmentAnswer"),
                (404, 409),
                request="AssignmentRequest",
            )
        },
        f"{_SUBSCRIPTION}/assignment/{{client_id}}": {
            "delete": _operation(
                "leaveAssignment",
                "Leave: the client's queues go to others, and what it has not committed returns",
                client,
                content("AssignmentLeft"),
                (404,),
            )
        },
        **{
            f"{_SUBSCRIPTION}/queues/{{queue}}/{verb}": {
                "post": _operation(verb, summary, queue, content(answer), (404, 409, *errors), request=request)
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
        "/v1/locks": {"get": _operation("listLocks", "All locks", [], content("LockList"), ())},
        path: {
            "get": _operation(
                "getLock", "A lock, who holds it, and how many wait", name, content("LockAnswer"), (404,)
            ),
            "put": _operation(
                "putLock",
                "Make a lock, or change how many may hold it",
                name,
                content("LockAnswer"),
                (409,),
                request="LockChange",
            ),
            "delete": _operation(
                "deleteLock", "Delete a lock; who holds it loses it", name, content("LockDeleted"), (404,)
            ),
        },
        **{
            f"{path}/{verb}": {
                "post": _operation(
                    f"{verb.partition('-')[0]}Lock", summary, name, content(answer), (404, *errors), request=request
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
    messages = content("LeaseGroupMessages")
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
                content("LeaseGroupList"),
                (404,),
            )
        },
        f"{groups}/{{stream}}/{{epoch}}": {
            "put": _operation(
                "putLeaseGroup",
                "Lease a batch with a frozen membership, or lease the messages of an existing one again",
                epoch,
                content("LeaseGroupAnswer"),
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
                    content(f"LeaseGroup{answer}"),
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
        responses[str(status)] = problem_response(status)
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "tags": [_TAG],
        "parameters": list(parameters),
        "responses": responses,
    }
    if request is not None:
        operation["requestBody"] = {"content": content(request), "required": request not in _MAY_BE_EMPTY}
    return operation
