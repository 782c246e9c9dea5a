"""The thin client of popgate: publish, pop, ack, release, extend and reject over HTTP, and a `Consumer`.

    from popgate_client import Client, Consumer

    with Client("http://127.0.0.1:8080") as client:
        client.publish("orders", "hello")
        for message in client.pop("orders", "billing", max_messages=10, wait_seconds=20):
            print(message.text)
            message.ack()

    Consumer("orders", "billing", lambda message: print(message.text)).run()

It requires only httpx, and does not need the proxy's code. The names below are the public interface; the modules are
not.
"""

from popgate_client.assignments import Assignment
from popgate_client.async_client import AsyncClient, AsyncLeasedMessage
from popgate_client.async_held_lock import AsyncHeldLock
from popgate_client.calling import Handler
from popgate_client.client import Client, LeasedMessage
from popgate_client.consumer import Consumer
from popgate_client.counters import Counters
from popgate_client.errors import (
    BrokerUnavailable,
    Conflict,
    DeadLetterNotFound,
    Fenced,
    Forbidden,
    GroupNotFound,
    LeaseGroupAcked,
    LeaseGroupExpired,
    LeaseGroupNotFound,
    LeaseLost,
    LimitExceeded,
    LockLost,
    LockNotAcquired,
    LockNotFound,
    LockUnavailable,
    MessageTooLarge,
    NoSubscribers,
    NotSupported,
    PopgateError,
    QuotaExceeded,
    RedriveNotFound,
    RequestInvalid,
    RetryLater,
    ServerFault,
    ServerUnreachable,
    StateUnavailable,
    TooManyInFlight,
    TopicNotFound,
    Unauthorized,
    WrongMode,
)
from popgate_client.handling import Reject, Retry
from popgate_client.held_lock import HeldLock
from popgate_client.keywords import GroupSettings, RetrySettings, TopicSettings
from popgate_client.lease_groups import (
    AsyncLeaseStream,
    LeaseGroup,
    LeaseGroupMessage,
    LeaseGroupsAcked,
    LeaseStream,
)
from popgate_client.locks import LockKind
from popgate_client.message import (
    LeaseFlag,
    Leases,
    Message,
    OutgoingMessage,
    PublishResult,
    SettleEntry,
    SettleResult,
    Verb,
)
from popgate_client.publishing import Deserializer, PublishFailed, PublishOptions, Serializer
from popgate_client.tokens import AsyncTokenSource, TokenSource, token_in

__all__ = [
    "Assignment",
    "AsyncClient",
    "AsyncHeldLock",
    "AsyncLeaseStream",
    "AsyncLeasedMessage",
    "AsyncTokenSource",
    "BrokerUnavailable",
    "Client",
    "Conflict",
    "Consumer",
    "Counters",
    "DeadLetterNotFound",
    "Deserializer",
    "Fenced",
    "Forbidden",
    "GroupNotFound",
    "GroupSettings",
    "Handler",
    "HeldLock",
    "LeaseFlag",
    "LeaseGroup",
    "LeaseGroupAcked",
    "LeaseGroupExpired",
    "LeaseGroupMessage",
    "LeaseGroupNotFound",
    "LeaseGroupsAcked",
    "LeaseLost",
    "LeaseStream",
    "LeasedMessage",
    "Leases",
    "LimitExceeded",
    "LockKind",
    "LockLost",
    "LockNotAcquired",
    "LockNotFound",
    "LockUnavailable",
    "Message",
    "MessageTooLarge",
    "NoSubscribers",
    "NotSupported",
    "OutgoingMessage",
    "PopgateError",
    "PublishFailed",
    "PublishOptions",
    "PublishResult",
    "QuotaExceeded",
    "RedriveNotFound",
    "Reject",
    "RequestInvalid",
    "Retry",
    "RetryLater",
    "RetrySettings",
    "Serializer",
    "ServerFault",
    "ServerUnreachable",
    "SettleEntry",
    "SettleResult",
    "StateUnavailable",
    "TokenSource",
    "TooManyInFlight",
    "TopicNotFound",
    "TopicSettings",
    "Unauthorized",
    "Verb",
    "WrongMode",
    "token_in",
]
