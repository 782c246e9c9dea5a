"""Describes the errors that operations may return, for OpenAPI."""

from typing import Any

from popgate.api.openapi_schemas import REF
from popgate.api.problems import CONTENT_TYPE

_ERRORS = {
    400: "invalid_request: a field is missing, unknown or has a wrong value",
    404: "topic_not_found, group_not_found, lease_group_not_found, lock_not_found, dead_letter_not_found, "
    "redrive_not_found, proxy_not_found",
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


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of errors by status, for FastAPI's parameter ``responses``. Status 500 is added."""
    return {status: problem_response(status) for status in (*statuses, 500)}


def problem_response(status: int) -> dict[str, Any]:
    """Return the OpenAPI response object for the errors with one status."""
    response: dict[str, Any] = {
        "description": _ERRORS[status],
        "content": {CONTENT_TYPE.decode(): {"schema": {"$ref": f"{REF}Problem"}}},
    }
    if status in (429, 503):
        schema = {"type": "integer", "minimum": 1}
        response["headers"] = {"Retry-After": {"description": "seconds", "required": True, "schema": schema}}
    return response
