"""The client's errors, as one tree by what the caller can do.

Owns the error classes and the table that maps the server's `code` (RFC 9457 problem documents) to them. `retrying` and
`exchange` decide what is repeated.

    PopgateError
      RequestInvalid            fix the request
        TopicNotFound  GroupNotFound  MessageTooLarge  Conflict  WrongMode  NoSubscribers
        DeadLetterNotFound  RedriveNotFound  LeaseGroupNotFound  LeaseGroupAcked  LeaseGroupExpired  LockNotFound
        NotSupported  QuotaExceeded (a Conflict)
      Fenced                    ask for the assignment again: another client may have the queue
      LeaseLost                 pop again: another client may have the message
      LockLost                  stop what the lock protects: another client may hold it
      RetryLater                the same call may succeed after `retry_after_seconds`
        BrokerUnavailable  StateUnavailable  TooManyInFlight  LimitExceeded  ServerUnreachable
        LockNotAcquired  LockUnavailable
      Unauthorized  Forbidden   use another token
      PublishFailed             some messages of a publish are not stored; `results` says which (`publishing`)
      ServerFault               the server failed, or its answer is malformed
"""

from collections.abc import Mapping


class PopgateError(Exception):
    """The root. `code` is stable and meant for programs, `detail` for people.

    `status` is the HTTP status, or None if the error does not come from an HTTP answer.
    """

    def __init__(self, code: str, detail: str, status: int | None = None) -> None:
        super().__init__(code, detail, status)
        self.code = code
        self.detail = detail
        self.status = status

    def __str__(self) -> str:
        return f"{self.detail} ({self.code})"


class RequestInvalid(PopgateError):
    """The request can't succeed as it is. `field` names the invalid field if the server reported it."""

    field: str | None = None


class TopicNotFound(RequestInvalid):
    """The topic does not exist and is not created on use."""


class GroupNotFound(RequestInvalid):
    """The group does not exist in this topic and is not created on use."""


class DeadLetterNotFound(RequestInvalid):
    """The dead letter does not exist; it may have been redriven or purged."""


class RedriveNotFound(RequestInvalid):
    """The group has had no redrive since its proxy was started."""


class MessageTooLarge(RequestInvalid):
    """A message (16 MiB) or a request (64 MiB) exceeds its limit."""


class Conflict(RequestInvalid):
    """The request contradicts what exists; `detail` says what to do."""


class QuotaExceeded(Conflict):
    """A quota of the server is used up; `detail` names the setting, and says what to do."""


class WrongMode(RequestInvalid):
    """The subscription is not in the consume mode that this call needs; `mode` is the current one."""

    mode: str | None = None


class NotSupported(RequestInvalid):
    """The server does not know this path: it is older than this call, or does not offer it (`Client.info`)."""


class NoSubscribers(RequestInvalid):
    """The topic has no group, so a published message would have no reader. It was not stored."""


class LeaseGroupNotFound(RequestInvalid):
    """The lease group does not exist. An empty lease group is not kept."""


class LeaseGroupAcked(RequestInvalid):
    """The lease group's epoch was acked, so it can't be used again."""


class LeaseGroupExpired(RequestInvalid):
    """The lease group's leases have expired; leasing the same epoch again leases its remaining messages."""


class LockNotFound(RequestInvalid):
    """The lock does not exist and is not created on use, or it was deleted."""


class LeaseLost(PopgateError):
    """The lease ended before this call, or the receipt handle is invalid; `code` says which. Nothing was changed."""


class Fenced(PopgateError):
    """The queue is not assigned to this pull client in this generation. Nothing was settled, and its uncommitted
    messages return."""


class LockLost(PopgateError):
    """The lock is no longer held; `detail` says why. The next holder has a higher fencing token."""


class RetryLater(PopgateError):
    """The call may succeed later. `retry_after_seconds` is the server's Retry-After, 0.0 if it sent none.

    `outcome_unknown`: the request may have taken effect, or still may; publishing again may store messages without a
    `dedup_id` twice.
    """

    retry_after_seconds: float = 0.0
    outcome_unknown: bool = False


class BrokerUnavailable(RetryLater):
    """The proxy can't reach the broker, or the broker has an alarm."""


class StateUnavailable(RetryLater):
    """The state store can't be reached: no lease can be granted or settled, but none is lost."""


class TooManyInFlight(RetryLater):
    """The subscription has the maximum number of leases that its policy allows."""


class LimitExceeded(RetryLater):
    """The token's owner uses as much as one of its limits allows; `detail` names the limit."""


class LockNotAcquired(RetryLater):
    """Others held the lock during the whole wait."""


class LockUnavailable(RetryLater):
    """The proxy can't grant locks at the moment, or another change of this lock is under way."""


class ServerUnreachable(RetryLater):
    """No answer came from popgate: none at all, or one of a gateway. `sent` and `outcome_unknown` are False only if the
    request certainly never left this process."""

    sent: bool = True
    outcome_unknown: bool = True


class Unauthorized(PopgateError):
    """The token is missing, unknown, expired or revoked."""


class Forbidden(PopgateError):
    """The token does not allow this. `action` is the missing permission, if the server named it."""

    action: str | None = None


class ServerFault(PopgateError):
    """The server failed, or the answer did not come from popgate."""


_BY_CODE: Mapping[str, type[PopgateError]] = {
    "invalid_request": RequestInvalid,
    "topic_not_found": TopicNotFound,
    "group_not_found": GroupNotFound,
    "dead_letter_not_found": DeadLetterNotFound,
    "redrive_not_found": RedriveNotFound,
    "message_too_large": MessageTooLarge,
    "conflict": Conflict,
    "quota_exceeded": QuotaExceeded,
    "wrong_mode": WrongMode,
    "fenced": Fenced,
    "not_found": NotSupported,
    "no_subscribers": NoSubscribers,
    "lease_group_not_found": LeaseGroupNotFound,
    "lease_group_acked": LeaseGroupAcked,
    "lease_group_expired": LeaseGroupExpired,
    "lock_not_found": LockNotFound,
    "lock_lost": LockLost,
    "lock_held": LockUnavailable,
    "lock_unavailable": LockUnavailable,
    "too_many_in_flight": TooManyInFlight,
    "limit_exceeded": LimitExceeded,
    "unauthenticated": Unauthorized,
    "forbidden": Forbidden,
    "broker_unavailable": BrokerUnavailable,
    "state_unavailable": StateUnavailable,
    "unavailable": RetryLater,
    "not_ready": RetryLater,
    # These appear only in the result of a single message.
    "not_confirmed": RetryLater,
    "not_sent": RetryLater,
    "server_unreachable": ServerUnreachable,
}

_BY_STATUS: Mapping[int, type[PopgateError]] = {
    401: Unauthorized,
    403: Forbidden,
    408: RetryLater,
    413: MessageTooLarge,
    429: RetryLater,
    # A gateway answers with these if it got no answer; it may have forwarded the request before.
    502: ServerUnreachable,
    503: ServerUnreachable,
    504: ServerUnreachable,
}


def error_from(
    problem: Mapping[str, object], *, status: int | None = None, retry_after_seconds: float = 0.0
) -> PopgateError:
    """Return the error for a problem document, or for the `error` of one entry (which has no status).

    An unknown code is mapped by the HTTP status, so that codes of a newer server still get the right class.
    """
    code = str(problem.get("code") or (f"http_{status}" if status else "failed"))
    detail = str(problem.get("detail") or problem.get("title") or "the server gave no reason")
    error = (_BY_CODE.get(code) or _kind_by_status(status))(code, detail, status)
    if isinstance(error, RetryLater):
        error.retry_after_seconds = retry_after_seconds
        error.outcome_unknown = error.outcome_unknown or problem.get("outcome_unknown") is True
    if isinstance(error, RequestInvalid):
        error.field = _text_or_none(problem.get("field"))
    if isinstance(error, Forbidden):
        error.action = _text_or_none(problem.get("action"))
    if isinstance(error, WrongMode):
        error.mode = _text_or_none(problem.get("mode"))
    return error


def _kind_by_status(status: int | None) -> type[PopgateError]:
    if status is None:
        return PopgateError
    if kind := _BY_STATUS.get(status):
        return kind
    return RequestInvalid if 300 <= status < 500 else ServerFault


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
