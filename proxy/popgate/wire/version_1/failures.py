"""Converts errors to fields of an answer and back, so that the sender of a message raises the same error.

``KINDS`` defines the names of errors in answers. These names do not depend on the names of the classes, so that a class
can be renamed. An error without a name in the table of the answering proxy or of the sender becomes RetryLater, because
such an error does not mean that the request is wrong.
"""

from msgspec import UNSET, Struct, UnsetType

from popgate.domain import errors
from popgate.domain.errors import (
    BrokerUnavailable,
    InvalidRequest,
    MessageTooLarge,
    PopgateError,
    QuotaExceeded,
    RetryLater,
    WrongMode,
)

KINDS: dict[str, type[PopgateError]] = {
    "invalid_request": errors.InvalidRequest,
    "request_error": errors.RequestError,
    "topic_not_found": errors.TopicNotFound,
    "group_not_found": errors.GroupNotFound,
    "queue_gone": errors.QueueGone,
    "lease_group_not_found": errors.LeaseGroupNotFound,
    "lease_group_acked": errors.LeaseGroupAcked,
    "lease_group_expired": errors.LeaseGroupExpired,
    "message_too_large": errors.MessageTooLarge,
    "conflict": errors.Conflict,
    "quota_exceeded": errors.QuotaExceeded,
    "wrong_mode": errors.WrongMode,
    "fenced": errors.Fenced,
    "dead_letter_not_found": errors.DeadLetterNotFound,
    "redrive_not_found": errors.RedriveNotFound,
    "lock_not_found": errors.LockNotFound,
    "lock_lost": errors.LockLost,
    "lock_held": errors.LockHeld,
    "lock_unavailable": errors.LockUnavailable,
    "retry_later": errors.RetryLater,
    "broker_unavailable": errors.BrokerUnavailable,
    "state_unavailable": errors.StateUnavailable,
    "not_a_member": errors.NotAMember,
    "peer_unavailable": errors.PeerUnavailable,
    "too_many_in_flight": errors.TooManyInFlight,
    "too_many_pops": errors.TooManyPops,
}
DETAIL_LENGTH_MAX = 2_000
RETRY_AFTER_SECONDS = 1.0

_NAMES = {family: name for name, family in KINDS.items()}
_UNFORESEEN = "unforeseen"


class Failure(Struct, frozen=True, omit_defaults=True):
    """The encoded form of an error. Fields that an error of this ``kind`` does not have are omitted."""

    kind: str
    detail: str
    retry_after_seconds: float | UnsetType = UNSET
    outcome_unknown: bool = False
    field: str | UnsetType = UNSET
    mode: str | UnsetType = UNSET
    setting: str | UnsetType = UNSET


def failure_of(error: PopgateError) -> Failure:
    """Return the encoded form of ``error``.

    The kind names the most specific class in ``KINDS`` that ``error`` is an instance of.
    """
    kind = next((_NAMES[family] for family in type(error).__mro__ if family in _NAMES), _UNFORESEEN)
    return Failure(
        kind=kind,
        detail=error.detail[:DETAIL_LENGTH_MAX],
        retry_after_seconds=error.retry_after_seconds if isinstance(error, RetryLater) else UNSET,
        outcome_unknown=isinstance(error, BrokerUnavailable) and error.outcome_unknown,
        field=error.field if isinstance(error, (InvalidRequest, MessageTooLarge)) else UNSET,
        mode=error.mode if isinstance(error, WrongMode) else UNSET,
        setting=error.setting if isinstance(error, QuotaExceeded) else UNSET,
    )


def error_of(failure: Failure) -> PopgateError:
    """Return the PopgateError that ``failure`` describes."""
    family = KINDS.get(failure.kind, RetryLater)
    detail = failure.detail
    wait = RETRY_AFTER_SECONDS if failure.retry_after_seconds is UNSET else failure.retry_after_seconds
    if issubclass(family, (InvalidRequest, MessageTooLarge)):
        return family(detail, field="" if failure.field is UNSET else failure.field)
    if issubclass(family, WrongMode):
        return family(detail, mode="" if failure.mode is UNSET else failure.mode)
    if issubclass(family, QuotaExceeded):
        return family(detail, setting="" if failure.setting is UNSET else failure.setting)
    if issubclass(family, BrokerUnavailable):
        return family(detail, retry_after_seconds=wait, outcome_unknown=failure.outcome_unknown)
    if issubclass(family, RetryLater):
        return family(detail, retry_after_seconds=wait)
    return family(detail)
