"""What the RabbitMQ adapter is told at start."""

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitOptions:
    """`amqp_urls` as aio-pika reads them: `amqp[s]://user:password@host:port/vhost`, TLS files in the query (`cafile`,
    `certfile`, `keyfile`, `no_verify_ssl=1`). They lead to the nodes of one RabbitMQ, and to one virtual host; which of
    them a connection stands on makes no difference but to who is asked first.

    `cluster` names the state that this process shares with others: popgates that name another one, or none, must not
    work on the same virtual host; a guard sees to it. `role` names this process in RabbitMQ's management interface.
    """

    amqp_urls: tuple[str, ...] = field(repr=False)
    cluster: str | None = None
    role: str = "proxy"
    heartbeat_seconds: int = 5
    connect_timeout_seconds: float = 10.0
    next_node_seconds: float = 2.0
    """For that long a node may keep a connection waiting where there is another one to try; later for longer, up to
    `connect_timeout_seconds`, for they may all be slow."""
    reply_timeout_seconds: float = 15.0
    """For everything that RabbitMQ answers at once when it is well."""
    confirm_timeout_seconds: float = 15.0
    consumer_timeout_seconds: float = 1_800.0
    """RabbitMQ's own setting of that name, which can't be read over AMQP."""
    asked_timeout_seconds: float = 100_000.0
    """The same for consumers that can choose it (quorum queues from 4.3 on): more than twice the longest lease, so that
    no lease has to be re-homed, which begins at half of this time."""
    guard_wait_seconds: float = 15.0
    """How long the connections of a popgate that was killed may linger: three heartbeats."""
    reconnect_seconds_min: float = 0.1
    reconnect_seconds_max: float = 5.0
    close_timeout_seconds: float = 1.0
    """A broker that does not answer holds up the exit no longer than this."""
    unconfirmed_count_max: int = 4096
    unconfirmed_bytes_max: int = 64 * 1024 * 1024

    @property
    def vhost(self) -> str:
        """That of the first URL. Of one that makes no sense it is the default: connecting says what is wrong."""
        try:
            return unquote(urlsplit(self.amqp_urls[0]).path[1:]) or "/"
        except ValueError:
            return "/"
