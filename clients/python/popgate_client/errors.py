"""What can go wrong, as one tree by what the caller can do about it.

This module owns the error classes and the one table from the server's `code` (RFC 9457 problem documents) to them.
It does not decide what is repeated: that is `retrying` and `exchange`.

    PopgateError
      RequestInvalid            fix the request
        TopicNotFound  GroupNotFound  MessageTooLarge  Conflict  WrongMode  NoSubscribers
        DeadLetterNotFound  RedriveNotFound  LeaseGroupNotFound  LeaseGroupAcked  LeaseGroupExpired  LockNotFound
        NotSupported  QuotaExceeded (a Conflict)
      Fenced                    ask for the assignment again: somebody else may have the queue
      LeaseLost                 pop again: somebody else may have the message
      LockLost                  stop what the lock protects: somebody else may hold it
      RetryLater                the same call may succeed after `retry_after_seconds`
        BrokerUnavailable  StateUnavailable  TooManyInFlight  ServerUnreachable  LockNotAcquired  LockUnavailable
      Unauthorized  Forbidden   give another token
      ServerFault               the server failed or answered nonsense
"""

from collections.abc import Mapping


class PopgateError(Exception):
    """The root. `code` is stable and meant for programs, `detail` for people.

    `status` is the HTTP status, or None where no HTTP answer stands behind the error.
    """

    def __init__(self, code: str, detail: str, status: int | None = None) -> None:
        super().__init__(code, detail, status)
        self.code = code
        self.detail = detail
        self.status = status

    def __str__(self) -> str:
        return f"{self.detail} ({self.code})"


class RequestInvalid(PopgateError):
    """The request can't succeed as it is. `field` names the bad field where the server said so."""

    field: str | None = None


class TopicNotFound(RequestInvalid):
    """The topic does not exist and is not created on use."""


class GroupNotFound(RequestInvalid):
    """The group does not exist in this topic and is not created on use."""


class DeadLetterNotFound(RequestInvalid):
    """There is no such dead letter, or not any more: it may have been redriven or purged."""


class RedriveNotFound(RequestInvalid):
    """The group has had no redrive since its proxy was started."""


class MessageTooLarge(RequestInvalid):
    """A message (16 MiB) or a request (64 MiB) is above its limit."""


class Conflict(RequestInvalid):
    """What exists contradicts what is asked for; `detail` says what to do."""


class QuotaExceeded(Conflict):
    """As much exists as a quota of the server allows; `detail` names the setting, and says what to do."""


class WrongMode(RequestInvalid):
    """The subscription is in another consume mode than this call needs; `mode` is the current one."""

    mode: str | None = None


class NotSupported(RequestInvalid):
    """The server has nothing at this path: it is older than this call, or does not offer it (`Client.info`)."""


class NoSubscribers(RequestInvalid):
    """The topic has no group, so a published message would reach nobody. It was not stored."""


class LeaseGroupNotFound(RequestInvalid):
    """There is no such lease group. One that was empty was not kept."""


class LeaseGroupAcked(RequestInvalid):
    """The lease group's epoch was acked: it is gone for good."""


class LeaseGroupExpired(RequestInvalid):
    """The lease group's leases ran out; leasing the same epoch again leases those of its messages that are left."""


class LockNotFound(RequestInvalid):
    """The lock does not exist and is not created on use, or it was deleted."""


class LeaseLost(PopgateError):
    """The lease ended before this call, or the receipt handle is not one. Nothing was changed; `code` says which."""


class Fenced(PopgateError):
    """The queue is not this pull client's in this generation: nothing was settled, and what it had not committed of it
    returns."""


class LockLost(PopgateError):
    """The lock is not held any longer; `detail` says why. Whoever holds it next has a higher fencing token."""


class RetryLater(PopgateError):
    """Not now. `retry_after_seconds` is what the server asked for, 0.0 where it did not say.

    `outcome_unknown`: the request was sent on and may yet take effect; publishing again may double the messages that
    have no `dedup_id`.
    """

    retry_after_seconds: float = 0.0
    outcome_unknown: bool = False


class BrokerUnavailable(RetryLater):
    """The broker behind the proxy can't be reached or has an alarm."""


class StateUnavailable(RetryLater):
    """The state store can't be reached: no lease can be given or settled, and none is forgotten."""


class TooManyInFlight(RetryLater):
    """The subscription has as many leases as its policy allows."""


class LockNotAcquired(RetryLater):
    """Others held the lock for as long as was waited."""


class LockUnavailable(RetryLater):
    """The proxy can give no lock at this moment, or somebody else administers this one."""


class ServerUnreachable(RetryLater):
    """No answer came from popgate: none at all, or a gateway's. `sent` is False only where the request surely never
    left this process, and `outcome_unknown` says the same."""

    sent: bool = True
    outcome_unknown: bool = True


class Unauthorized(PopgateError):
    """The token is missing or unknown."""


class Forbidden(PopgateError):
    """The token does not allow this."""


class ServerFault(PopgateError):
    """The server failed, or what answered was not popgate."""


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
    "broker_unavailable": BrokerUnavailable,
    "state_unavailable": StateUnavailable,
    "unavailable": RetryLater,
    "not_ready": RetryLater,
    # These stand in the result of one message only.
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
    # What a gateway in front of the proxies says when it got no answer, and some do after they had sent the request on.
    502: ServerUnreachable,
    503: ServerUnreachable,
    504: ServerUnreachable,
}


def error_from(
    problem: Mapping[str, object], *, status: int | None = None, retry_after_seconds: float = 0.0
) -> PopgateError:
    """The error for a problem document, or for the `error` of one entry (which has no status).

    An unknown code is mapped by the HTTP status, so that a newer server's codes still land in the right branch.
    """
    code = str(problem.get("code") or (f"http_{status}" if status else "failed"))
    detail = str(problem.get("detail") or problem.get("title") or "the server gave no reason")
    error = (_BY_CODE.get(code) or _kind_by_status(status))(code, detail, status)
    if isinstance(error, RetryLater):
        error.retry_after_seconds = retry_after_seconds
        error.outcome_unknown = error.outcome_unknown or problem.get("outcome_unknown") is True
    if isinstance(error, RequestInvalid):
        error.field = _text_or_none(problem.get("field"))
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
