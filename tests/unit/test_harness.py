"""The harness itself: what other tests assume about the servers that they use."""

import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPConnectionError, AMQPError, ConnectionClosedByBroker
from pika.spec import Basic, BasicProperties

from support.processes import PortBlock, Server, ServerFailedError, accepts, wait_until
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

PERSISTENT = BasicProperties(delivery_mode=2)
TESTS_FOLDER = Path(__file__).parents[1]


class Sleeper(Server):
    """A server that runs on any machine: it is ready once it has printed so."""

    ready_timeout_seconds = 5
    stop_timeout_seconds = 5

    def __init__(self, folder: Path, command: str = "echo ready; exec sleep 60") -> None:
        super().__init__("sleeper", folder, arguments=["sh", "-c", command])

    def _answers(self) -> bool:
        return "ready" in self.output


@contextmanager
def channel_to(amqp_url: str) -> Generator[BlockingChannel]:
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def ignore(channel: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
    """Consume messages and keep them."""


def process_lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- processes and ports


def test_two_blocks_of_ports_never_overlap() -> None:
    blocks = [PortBlock(5) for _ in range(20)]
    assert len({port for block in blocks for port in block.ports}) == 100


def test_a_server_can_be_stopped_killed_and_started_again(tmp_path: Path) -> None:
    with Sleeper(tmp_path) as server:
        assert server.stop() == -15
        assert not server.is_running()
        server.start()
        server.kill()
        assert server.wait(1) == -9
        server.start()
        assert server.is_running()
    assert not server.is_running()


def test_a_paused_server_is_still_killed_at_the_end(tmp_path: Path) -> None:
    with Sleeper(tmp_path) as server:
        server.pause()
    assert not server.is_running()


def test_a_server_that_ends_at_its_start_fails_at_once_with_its_last_words(tmp_path: Path) -> None:
    server = Sleeper(tmp_path, "echo no such luck >&2; exit 3")
    with pytest.raises(ServerFailedError, match=r"(?s)exit status 3.*no such luck"):
        server.start()


def test_the_output_of_an_earlier_start_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    with Sleeper(tmp_path, "echo ready $$; exec sleep 60") as server:
        before = server.output
        server.restart()
        assert server.output != before
        assert server.output.count("ready") == 1


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="only Linux tells a child that its parent was killed")
def test_killing_the_test_run_with_sigkill_ends_its_servers(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from unit.test_harness import Sleeper\n"
        "server = Sleeper(pathlib.Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS_FOLDER)}
    with Popen([sys.executable, "-c", program, str(tmp_path)], stdin=PIPE, stdout=PIPE, env=environment) as test_run:
        assert test_run.stdout is not None
        server_pid = int(test_run.stdout.readline())
        assert process_lives(server_pid)
        test_run.kill()
    wait_until(lambda: not process_lives(server_pid), timeout_seconds=5, what="the server's end")


FORKED = """
import pathlib, sys
from support import preloaded
from support.proxy import ProxyProcess
if __name__ == "__main__":
    preloaded.turn_on()
    proxy = ProxyProcess(pathlib.Path(sys.argv[1]), environment={"POPGATE_LOG_LEVEL": "warning"})
    proxy.start()
    assert type(proxy._popen) is preloaded.ForkedPopgate
    assert proxy.client.put("/v1/admin/topics/t", json={"queues": 1}).status_code == 201
    assert proxy.stop() == 0
    proxy.start()
    assert proxy.client.get("/v1/admin/topics/t").status_code == 200
    first = proxy.pid
    proxy.kill()
    assert proxy.wait(5) == -9
    proxy.start()
    assert proxy.pid != first
    print(proxy.pid, flush=True)
    sys.stdin.read()
"""


def test_a_forked_proxy_is_a_process_of_its_own_and_ends_with_the_test_run(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORKED)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, str(program), str(tmp_path / "proxy")]
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS_FOLDER), *filter(None, sys.path)])
    with Popen(command, stdin=PIPE, stdout=PIPE, env=environment) as test_run:
        assert test_run.stdout is not None
        pid = int(test_run.stdout.readline())
        assert os.getpgid(pid) == os.getsid(pid) == pid
        assert process_lives(pid)
        test_run.kill()
    wait_until(lambda: not process_lives(pid), timeout_seconds=5, what="the proxy's end")


# ---------------------------------------------------------------- RabbitMQ


def test_each_test_has_a_virtual_host_of_its_own(rabbitmq: RabbitNode, amqp_url: str) -> None:
    rabbitmq.add_vhost("another test's")
    with channel_to(amqp_url) as mine, channel_to(rabbitmq.amqp_url("another test's")) as another:
        mine.queue_declare("orders", durable=True)
        mine.basic_publish("", "orders", b"mine")
        another.queue_declare("orders", durable=True)
        assert another.basic_get("orders")[0] is None
        assert mine.basic_get("orders", auto_ack=True)[2] == b"mine"
    rabbitmq.delete_vhost("another test's")


def test_the_management_api_shows_queues_and_consumers(rabbitmq: RabbitNode, amqp_url: str) -> None:
    vhost = amqp_url.rpartition("/")[2]
    with channel_to(amqp_url) as channel:
        channel.queue_declare("orders", durable=True)
        channel.basic_consume("orders", ignore, consumer_tag="me")
        assert [queue["name"] for queue in rabbitmq.queues(vhost)] == ["orders"]
        wait_until(
            lambda: [consumer["consumer_tag"] for consumer in rabbitmq.consumers(vhost)] == ["me"],
            timeout_seconds=10,
            what="the consumer to be seen",
        )


def test_a_connection_can_be_cut_from_the_brokers_side(rabbitmq: RabbitNode, amqp_url: str) -> None:
    vhost = amqp_url.rpartition("/")[2]
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    rabbitmq.close_connections(vhost)
    with pytest.raises(ConnectionClosedByBroker):
        connection.process_data_events(time_limit=10)


def test_a_quorum_queue_keeps_a_confirmed_message_when_its_node_is_killed(rabbitmq: RabbitNode, amqp_url: str) -> None:
    with channel_to(amqp_url) as channel:
        channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
        channel.basic_publish("", "orders", b"kept", PERSISTENT)
        rabbitmq.sync()
        rabbitmq.kill()
        assert not rabbitmq.is_running()
        with pytest.raises(AMQPConnectionError):
            channel.connection.process_data_events(time_limit=10)
    rabbitmq.start()
    found: list[bytes | None] = []

    def answers() -> bool:
        """Wait for an answer: until the queue has a leader again, RabbitMQ answers with an error; an empty queue is
        an answer.
        """
        try:
            with channel_to(amqp_url) as channel:
                body = channel.basic_get("orders")[2]
        except AMQPError:
            return False
        found.append(body)
        return True

    wait_until(answers, timeout_seconds=60, what="the queue to be served again")
    assert found == [b"kept"]


def test_the_command_line_tools_reach_the_private_node(rabbitmq: RabbitNode) -> None:
    assert rabbitmq.name in rabbitmq.ctl("eval", "node().")
    with pytest.raises(ServerFailedError, match="no_such_command"):
        rabbitmq.ctl("no_such_command")


# ---------------------------------------------------------------- Redis


def test_redis_keeps_what_it_answered_when_it_is_killed(redis_server: RedisServer) -> None:
    assert accepts(redis_server.port, say=b"SET kept yes\r\n", expect=b"+OK")
    redis_server.kill()
    redis_server.start()
    assert accepts(redis_server.port, say=b"GET kept\r\n", expect=b"$3\r\nyes")
    assert accepts(redis_server.port, say=b"FLUSHALL\r\n", expect=b"+OK")
