"""The settings of the RabbitMQ adapter."""

from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitOptions:
    """The adapter's settings.

    `amqp_urls` have aio-pika's format: `amqp[s]://user:password@host:port/vhost`, with TLS files in the query
    (`cafile`, `certfile`, `keyfile`, `no_verify_ssl=1`). All of them lead to the nodes of one RabbitMQ and to one
    virtual host. Their order only decides which node is tried first.

    `cluster` is the name of the state that this process shares with other processes. A guard prevents processes with
    another `cluster`, or with none, from using the same virtual host. `role` is a part of the connections' names, which
    RabbitMQ's management interface shows.
    """

    amqp_urls: tuple[str, ...] = field(repr=False)
    cluster: str | None = None
    role: str = "proxy"
    heartbeat_seconds: int = 5
    connect_timeout_seconds: float = 10.0
    next_node_seconds: float = 2.0
    """Timeout in seconds of the first attempt to connect to a node, if there are several nodes. For later attempts, the
    timeout grows up to `connect_timeout_seconds`, because all nodes may be slow."""
    reply_timeout_seconds: float = 15.0
    """Maximum number of seconds for calls that a healthy RabbitMQ answers at once."""
    confirm_timeout_seconds: float = 15.0
    consumer_timeout_seconds: float = 1_800.0
    """RabbitMQ's own setting of this name. It can't be read over AMQP."""
    asked_timeout_seconds: float = 100_000.0
    """The consumer timeout in seconds for consumers that can choose it (quorum queues from 4.3 on). After half of
    this time, popgate requeues a message that is still unsettled (``engine.queue.delivery_renewal``). The value is more
    than twice the longest lease, so no leased message has to be requeued."""
    guard_wait_seconds: float = 15.0
    """Maximum seconds to wait until RabbitMQ ends the connections of a lost popgate process: three heartbeats."""
    reconnect_seconds_min: float = 0.1
    reconnect_seconds_max: float = 5.0
    close_timeout_seconds: float = 1.0
    """Maximum number of seconds by which a broker that does not answer delays the exit."""
    unconfirmed_count_max: int = 4096
    unconfirmed_bytes_max: int = 64 * 1024 * 1024

    @property
    def is_unverified(self) -> bool:
        """Whether a URL switches the verification of RabbitMQ's certificate off."""
        urls = [urlsplit(url) for url in self.amqp_urls]
        return any(url.scheme == "amqps" and "1" in parse_qs(url.query).get("no_verify_ssl", ()) for url in urls)

    @property
    def vhost(self) -> str:
        """The virtual host of the first URL.

        If the URL is invalid, this is the default virtual host `/`. The attempt to connect reports the invalid URL.
        """
        try:
            return unquote(urlsplit(self.amqp_urls[0]).path[1:]) or "/"
        except ValueError:
            return "/"
