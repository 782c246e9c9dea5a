"""Names the attributes of spans, after OpenTelemetry's semantic conventions for messaging.

https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from collections.abc import Sequence

from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from popgate.domain.errors import PopgateError

SYSTEM = "popgate"
MESSAGE_ID = "messaging.message.id"
PARTITION = "messaging.destination.partition.id"
Attributes = dict[str, AttributeValue]


def attributes_of(
    operation: str,
    kind: str | None,
    topic: str,
    group: str | None = None,
    *,
    message_ids: Sequence[str] = (),
    count: int | None = None,
) -> Attributes:
    """Return the attributes of a span. ``kind`` is the type of the operation in the conventions, or None if they have
    none for it. ``count``: the number of messages, if it is not that of ``message_ids``."""
    found: Attributes = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.destination.name": topic,
    }
    if kind is not None:
        found["messaging.operation.type"] = kind
    if group is not None:
        found["messaging.consumer.group.name"] = group
    count = len(message_ids) if count is None else count
    if count != 1:
        found["messaging.batch.message_count"] = count
    elif message_ids and message_ids[0]:
        found[MESSAGE_ID] = message_ids[0]
    return found


def note_error(span: Span, error: BaseException) -> None:
    """Record why an operation has failed."""
    code, detail = (error.code, error.detail) if isinstance(error, PopgateError) else (type(error).__name__, "")
    note_failure(span, code, detail)


def note_failure(span: Span, code: str, detail: str = "") -> None:
    """Record that an operation has failed, with a stable ``code``."""
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR, detail or None)
