"""Defines popgate's errors, as a tree that is ordered by what the caller can do about an error.

    PopgateError
    +- RequestError      fix the request
    +- LockLost          stop the work that the lock protects, and acquire the lock again
    +- Unauthenticated   send a valid credential
    +- Forbidden         ask an administrator for the permission
    +- RetryLater        the same request may succeed after ``retry_after_seconds``
    +- StartupError      fix the configuration or the machine; the process can't start

A lost lease is not an exception: the answer to a settlement reports it for each entry.
"""


class PopgateError(Exception):
    """Root of all errors that popgate raises deliberately. ``code`` is stable and part of the HTTP interface."""

    code = "internal_error"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class RequestError(PopgateError):
    """The request can't succeed as it stands."""

    code = "invalid_request"


class InvalidRequest(RequestError):
    """A field has a wrong type, value or name. ``field`` is its path, such as ``messages[3].body``."""

    def __init__(self, detail: str, *, field: str) -> None:
        super().__init__(detail)
        self.field = field


class TopicNotFound(RequestError):
    code = "topic_not_found"


class GroupNotFound(RequestError):
    code = "group_not_found"


class LeaseGroupNotFound(RequestError):
    """The lease group does not exist or is not complete yet. A PUT of the group creates or completes it."""

    code = "lease_group_not_found"


class LeaseGroupAcked(RequestError):
    """The lease group's epoch was acknowledged, and the group no longer exists."""

    code = "lease_group_acked"


class LeaseGroupExpired(RequestError):
    """The leases of the lease group have expired. A PUT of the group leases the same messages again."""

    code = "lease_group_expired"


class MessageTooLarge(RequestError):
    """A message, its headers or the whole request exceeds its maximum size."""

    code = "message_too_large"

    def __init__(self, detail: str, *, field: str) -> None:
        super().__init__(detail)
        self.field = field


class Conflict(RequestError):
    """The request conflicts with an existing object or its state; ``detail`` says what to do."""

    code = "conflict"


class QuotaExceeded(Conflict):
    """The limit that the setting ``setting`` defines is reached; ``detail`` says what to do."""

    code = "quota_exceeded"

    def __init__(self, detail: str, *, setting: str) -> None:
        super().__init__(detail)
        self.setting = setting


class WrongMode(RequestError):
    """The subscription is not in the consume mode that the request requires. ``mode`` is its present mode."""

    code = "wrong_mode"

    def __init__(self, detail: str, *, mode: str) -> None:
        super().__init__(detail)
        self.mode = mode


class Fenced(RequestError):
    """The pull client must ask for its assignment, because the queue moves to another client or has moved already.

    If the queue has moved, the client can't settle the messages that it pulled from the queue.
    """

    code = "fenced"


class RetryLater(PopgateError):
    """Nothing is wrong with the request; try again after ``retry_after_seconds``."""

    code = "unavailable"

    def __init__(self, detail: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class BrokerUnavailable(RetryLater):
    """The broker can't be reached or does not answer.

    ``outcome_unknown``: the request was sent and may still take effect. If it was a publish, repeating it may duplicate
    the message.
    """

    code = "broker_unavailable"

    def __init__(self, detail: str, *, retry_after_seconds: float = 1.0, outcome_unknown: bool = False) -> None:
        super().__init__(detail, retry_after_seconds=retry_after_seconds)
        self.outcome_unknown = outcome_unknown


class StateUnavailable(RetryLater):
    code = "state_unavailable"


class NotAMember(StateUnavailable):
    """The cluster has removed this proxy, or the store has lost its data. The proxy owns no queues until it joins
    again."""


class PeerUnavailable(RetryLater):
    """The proxy that should serve the request can't do so now: it does not answer, is stopping, or does not own the
    queue."""

    code = "peer_unavailable"


class DeadLetterNotFound(RequestError):
    code = "dead_letter_not_found"


class RedriveNotFound(RequestError):
    code = "redrive_not_found"


class LockNotFound(RequestError):
    """No administrator has defined a lock with this name, or the lock has no slots."""

    code = "lock_not_found"


class LockLost(PopgateError):
    """The client no longer holds the lock. It must stop the work that the lock protects, and acquire the lock again."""

    code = "lock_lost"


class LockHeld(RetryLater):
    """Other clients held the lock for as long as the request waited."""

    code = "lock_held"


class LockUnavailable(RetryLater):
    """Locks can't be served: the broker does not answer, or too many locks are in use."""

    code = "lock_unavailable"


class TooManyInFlight(RetryLater):
    """The group has as many leases as its ``max_in_flight`` allows, or a pull client has too many uncommitted
    messages."""

    code = "too_many_in_flight"


class TooManyPops(RetryLater):
    """The number of pops that wait for messages has reached its maximum."""

    code = "too_many_pops"


class LimitExceeded(RetryLater):
    """The principal uses as much as one of its limits allows (``permissions.Limits``); ``detail`` names the limit."""

    code = "limit_exceeded"


class QueueGone(RequestError):
    """A queue of a subscription does not exist on the broker. Requests get 404 until the queue is declared again."""

    code = "topic_not_found"


def queue_gone_detail(queue: str) -> str:
    return f"queue {queue} does not exist on the broker; create the group again to declare it"


class Unauthenticated(PopgateError):
    """The request has no valid credential. ``detail`` says what is wrong only with a token whose signature is valid."""

    code = "unauthenticated"


class Forbidden(PopgateError):
    """The caller is known, but may not do this. ``action`` is the missing permission."""

    code = "forbidden"

    def __init__(self, detail: str, *, action: str) -> None:
        super().__init__(detail)
        self.action = action


class StartupError(PopgateError):
    """popgate can't start; ``detail`` is one line that says why and what to do."""

    code = "startup_failed"


class NoCommonVersion(StartupError):
    """This proxy and another member of the cluster support no common version of the peer protocol."""
