"""A team's RabbitMQ with existing queues and publishers, and a popgate that adopts them.

This module owns the virtual host, the proxy process on it, and the plain AMQP beside it. The team's side is pika,
without popgate; popgate's side is HTTP as a client sees it.
"""

import secrets
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

from support.processes import Startable
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

KINDS = ("classic", "quorum")
GROUP = "workers"
UNAVAILABLE_SECONDS_MAX = 20.0
"""Maximum seconds for popgate to recover from a cut connection, on a busy machine."""
RETRY_SECONDS = 0.1
Popped: TypeAlias = Mapping[str, Any]
"""One message of a pop's answer, as JSON shows it."""


class Site(Startable):
    """One virtual host and one proxy on it, with these flags. A context manager that starts and ends both."""

    def __init__(self, node: RabbitNode, folder: Path, *flags: str, user: str = "guest") -> None:
        self.node = node
        self.vhost = f"test-{secrets.token_hex(4)}"
        self.amqp_url = node.amqp_url(self.vhost)
        self.proxy = ProxyProcess(folder, "--amqp-url", self.amqp_url.replace("guest:guest", f"{user}:{user}"), *flags)

    def start(self) -> None:
        self.node.add_vhost(self.vhost)
        self.proxy.start()

    def close(self) -> None:
        self.proxy.close()
        self.node.delete_vhost(self.vhost)

    # ------------------------------------------------------------ the team's side

    @contextmanager
    def channel(self) -> Generator[BlockingChannel]:
        """Open a plain AMQP channel with publisher confirms."""
        with pika.BlockingConnection(pika.URLParameters(self.amqp_url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            yield channel

    def declare(self, kind: str, arguments: Mapping[str, Any] | None = None) -> str:
        """Declare a new durable queue; return its name."""
        queue = f"{kind}-{secrets.token_hex(4)}"
        with self.channel() as channel:
            channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind, **(arguments or {})})
        return queue

    def publish(self, queue: str, *bodies: bytes, properties: BasicProperties | None = None) -> None:
        """Publish messages to the queue, confirmed one by one, as any program does."""
        with self.channel() as channel:
            for body in bodies:
                channel.basic_publish("", queue, body, properties or BasicProperties(delivery_mode=2), mandatory=True)

    def publish_with_ids(self, queue: str, message_ids: Sequence[str]) -> None:
        """Publish messages whose message_id equals their body."""
        for message_id in message_ids:
            properties = BasicProperties(delivery_mode=2, message_id=message_id)
            self.publish(queue, message_id.encode(), properties=properties)

    def take(self, queue: str) -> tuple[BasicProperties, bytes]:
        """Get the next message of a queue by basic.get, as inspection tools do. Raises: LookupError if there is
        none.
        """
        with self.channel() as channel:
            _, properties, body = channel.basic_get(queue, auto_ack=True)
            if properties is not None and body is not None:
                return properties, body
        raise LookupError(f"{queue} is empty")

    @contextmanager
    def foreign_consumers(self, queue: str, count: int = 1) -> Generator[None]:
        """Run the team's own consumers, which never settle their messages."""
        with self.channel() as channel:
            for _ in range(count):
                channel.basic_consume(queue, _keep)
            yield

    def ready(self, queue: str) -> int:
        with self.channel() as channel:
            count: int = channel.queue_declare(queue, passive=True).method.message_count
            return count

    # ------------------------------------------------------------ popgate's side

    def put_topic(self, topic: str, *queues: str, **settings: Any) -> tuple[int, dict[str, Any]]:
        """Request the adoption; return (status, answer)."""
        answer = self.proxy.client.put(f"/v1/admin/topics/{topic}", json={"adopt": list(queues), **settings})
        return answer.status_code, answer.json()

    def adopt(self, *queues: str, unique_message_ids: bool = False, **policy: Any) -> "Adopted":
        """Adopt queues as a new topic with one group."""
        topic = f"topic-{secrets.token_hex(4)}"
        settings = {"unique_message_ids": True} if unique_message_ids else {}
        status, answer = self.put_topic(topic, *queues, **settings)
        assert status == 201, answer
        answered = self.proxy.client.put(f"/v1/admin/topics/{topic}/groups/{GROUP}", json=policy)
        assert answered.status_code == 201, answered.text
        return Adopted(self.proxy, topic)


class Adopted:
    """The one group of an adopted topic, as a client sees it."""

    def __init__(self, proxy: ProxyProcess, topic: str) -> None:
        self.topic = topic
        self.path = f"/v1/topics/{topic}/groups/{GROUP}"
        self._http = proxy.client

    def pop(self, max_messages: int = 1, *, wait: float = 10.0, lease: float = 60.0) -> list[Popped]:
        """Pop up to that many; return an empty list if the wait ends without one. Repeats on 503, as clients do."""
        asked = {"max_messages": max_messages, "wait_seconds": wait, "invisibility_seconds": lease}
        deadline = time.monotonic() + UNAVAILABLE_SECONDS_MAX
        while (answer := self._http.post(f"{self.path}/pop", json=asked)).status_code == 503:
            assert time.monotonic() < deadline, answer.text
            assert "retry-after" in answer.headers
            time.sleep(RETRY_SECONDS)
        assert answer.status_code == 200, answer.text
        messages: list[Popped] = answer.json()["messages"]
        return messages

    def pop_one(self, *, wait: float = 10.0, lease: float = 60.0) -> Popped:
        (message,) = self.pop(wait=wait, lease=lease)
        return message

    def pop_all(self, *, lease: float = 60.0) -> list[Popped]:
        """Pop all available messages, without acks."""
        messages: list[Popped] = []
        while more := self.pop(256, wait=1.0, lease=lease):
            messages += more
        return messages

    def pop_count(self, count: int) -> list[Popped]:
        """Pop exactly that many, in several pops if needed; fail if they don't come."""
        messages: list[Popped] = []
        while len(messages) < count:
            more = self.pop(count - len(messages))
            assert more, f"only {len(messages)} of {count} messages came"
            messages += more
        return messages

    def ack(self, *messages: Popped) -> list[str]:
        handles = [message["receipt_handle"] for message in messages]
        return self._settle("ack", {"receipt_handles": handles})

    def release(self, *messages: Popped) -> list[str]:
        return self._settle("release", {"entries": _entries(messages, delay_seconds=0)})

    def extend(self, *messages: Popped, lease: float) -> list[str]:
        return self._settle("extend", {"entries": _entries(messages, invisibility_seconds=lease)})

    def reject(self, *messages: Popped, reason: str) -> list[str]:
        return self._settle("reject", {"entries": _entries(messages, reason=reason)})

    def state(self) -> dict[str, Any]:
        answer = self._http.get(self.path)
        assert answer.status_code == 200, answer.text
        state: dict[str, Any] = answer.json()
        return state

    def _settle(self, verb: str, body: Mapping[str, Any]) -> list[str]:
        answer = self._http.post(f"{self.path}/{verb}", json=body)
        assert answer.status_code == 200, answer.text
        return [result["status"] for result in answer.json()["results"]]


def _keep(channel: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
    """Keep a message without an ack, as a consumer's callback."""


def _entries(messages: Sequence[Popped], **options: Any) -> list[dict[str, Any]]:
    return [{"receipt_handle": message["receipt_handle"], **options} for message in messages]


class BusyPublisher:
    """A team's publisher that runs until it is stopped, on a separate connection."""

    def __init__(self, site: Site, exchange: str) -> None:
        self.published: list[bytes] = []
        self._site = site
        self._exchange = exchange
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="busy publisher")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop; return when the last message is confirmed."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with self._site.channel() as channel:
            while not self._stopping.is_set():
                body = b"busy %d" % len(self.published)
                channel.basic_publish(self._exchange, "any", body, BasicProperties(delivery_mode=2), mandatory=True)
                self.published.append(body)
