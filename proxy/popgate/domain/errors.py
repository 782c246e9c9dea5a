"""The tree of errors, ordered by what the caller can do about them.

    PopgateError
    +- RequestError      fix the request
    +- LockLost          stop what the lock protects, and acquire it anew
    +- RetryLater        the same request may succeed after ``retry_after_seconds``
    +- StartupError      fix the configuration or the machine; the process can't start

A lease that is lost is no exception: settlements answer it per entry.
"""


class PopgateError(Exception):
    """Root of all errors that popgate raises on purpose. ``code`` is stable and part of the HTTP interface."""

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
    """No such lease group, or nobody has been told of it yet: PUT it."""

    code = "lease_group_not_found"


class LeaseGroupAcked(RequestError):
    """The lease group's epoch was acked: it is gone for good."""

    code = "lease_group_acked"


class LeaseGroupExpired(RequestError):
    """The group's leases ran out; a PUT leases the same messages again."""

    code = "lease_group_expired"


class MessageTooLarge(RequestError):
    """A message, its headers or the whole request is over its limit."""

    code = "message_too_large"

    def __init__(self, detail: str, *, field: str) -> None:
        super().__init__(detail)
        self.field = field


class Conflict(RequestError):
    """What exists contradicts what is asked for; ``detail`` says what to do."""

    code = "conflict"


class QuotaExceeded(Conflict):
    """As much exists as ``setting`` allows; ``detail`` names it, and what to do."""

    code = "quota_exceeded"

    def __init__(self, detail: str, *, setting: str) -> None:
        super().__init__(detail)
        self.setting = setting


class WrongMode(RequestError):
    """The subscription is in another consume mode."""

    code = "wrong_mode"

    def __init__(self, detail: str, *, mode: str) -> None:
        super().__init__(detail)
        self.mode = mode


class Fenced(RequestError):
    """The pull client's generation is overtaken: what it had of the queue is not its own any more."""

    code = "fenced"


class RetryLater(PopgateError):
    """Nothing is wrong with the request; try again after ``retry_after_seconds``."""

    code = "unavailable"

    def __init__(self, detail: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class BrokerUnavailable(RetryLater):
    """``outcome_unknown``: something was sent, and may yet take effect; repeating a publish may double it."""

    code = "broker_unavailable"

    def __init__(self, detail: str, *, retry_after_seconds: float = 1.0, outcome_unknown: bool = False) -> None:
        super().__init__(detail, retry_after_seconds=retry_after_seconds)
        self.outcome_unknown = outcome_unknown


class StateUnavailable(RetryLater):
    code = "state_unavailable"


class NotAMember(StateUnavailable):
    """The cluster takes this proxy for dead, or has lost its data: it joins again, and owns nothing until then."""


class PeerUnavailable(RetryLater):
    """The proxy that could answer this does not: it has gone, or is about to be found to have."""

    code = "peer_unavailable"


class DeadLetterNotFound(RequestError):
    code = "dead_letter_not_found"


class RedriveNotFound(RequestError):
    code = "redrive_not_found"


class LockNotFound(RequestError):
    """Nobody has administered a lock of this name, or it has no slots."""

    code = "lock_not_found"


class LockLost(PopgateError):
    """The lock is no longer held: stop what it protects, and acquire it anew."""

    code = "lock_lost"


class LockHeld(RetryLater):
    """Others hold the lock, and did for as long as was waited."""

    code = "lock_held"


class LockUnavailable(RetryLater):
    """Locks can't be asked about: the broker does not answer, or there are too many of them."""

    code = "lock_unavailable"


class TooManyInFlight(RetryLater):
    """The group has as many leases as its ``max_in_flight`` allows."""

    code = "too_many_in_flight"


class TooManyPops(RetryLater):
    """As many pops wait for messages already as may."""

    code = "too_many_pops"


class QueueGone(RequestError):
    """A queue that a subscription stands on does not exist on the broker; 404 until it is declared again."""

    code = "topic_not_found"


def queue_gone_detail(queue: str) -> str:
    return f"queue {queue} does not exist on the broker; create the group again to declare it"


class StartupError(PopgateError):
    """popgate can't start; ``detail`` is one line that says why and what to do."""

    code = "startup_failed"


class NoCommonVersion(StartupError):
    """Members of the cluster speak no version of the proxies' protocol that this proxy speaks."""
