"""`popgate serve` as a process: its banner, what prevents its start, and how it ends."""

import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from popgate_client import Client
from support.command_line import CommandLine, Done
from support.processes import PortBlock, wait_until
from support.proxy import ProxyProcess, popgate_command
from support.rabbitmq import RabbitNode

EXIT_SECONDS_MAX = 2.0
START_SECONDS_MAX = 30


@pytest.fixture
def block() -> PortBlock:
    """A port that is reserved while this object lives."""
    return PortBlock()


@pytest.fixture
def port(block: PortBlock) -> int:
    return block.ports[0]


def refused(*arguments: str, environment: dict[str, str] | None = None, code: int = 1) -> str:
    """Return the error of a proxy that can't start; check that it has no traceback, and the exit code."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("POPGATE_")}
    done = subprocess.run(
        popgate_command("serve", *arguments),
        env={**own, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=START_SECONDS_MAX,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("popgate: ")
    assert "Traceback" not in done.stderr
    return done.stderr


def one_line(said: str) -> str:
    assert len(said.splitlines()) == 1, said
    return said


# ---------------------------------------------------------------- the banner


def pasted(proxy: ProxyProcess, shell: str) -> Done:
    """Run the indented lines of the banner in a shell."""
    lines = [line.strip() for line in proxy.output.splitlines() if line.startswith("  ")]
    done = subprocess.run([shell], input="\n".join(lines), capture_output=True, text=True, timeout=30, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def test_the_banner_says_where_it_is_and_where_it_keeps_its_data(shared_proxy: ProxyProcess) -> None:
    banner = shared_proxy.output
    assert shared_proxy.url in banner.splitlines()[0]
    assert f"data folder: {shared_proxy.data_folder}" in banner
    assert len([line for line in banner.splitlines() if line.startswith("  ")]) == 3


def test_the_three_lines_of_the_banner_work_when_they_are_pasted(own_proxy: ProxyProcess) -> None:
    for shell in ("sh", "bash"):  # the second time on a topic that is there already
        done = pasted(own_proxy, shell)
        assert done.code == 0
        published, acked = re.findall(r'\{"results":\[.*?\]\}', done.out)
        assert '"published"' in published
        assert acked == '{"results":[{"status":"acked"}]}'
        assert '"body":"hello"' in done.err


def test_the_lines_of_the_banner_work_on_rabbitmq_too(tmp_path: Path, amqp_url: str) -> None:
    with ProxyProcess(tmp_path / "proxy", "--amqp-url", amqp_url) as proxy:
        assert "RabbitMQ" in proxy.output.splitlines()[0]
        assert '{"status":"acked"}' in pasted(proxy, "sh").out


def test_an_answer_does_not_wait_for_nagles_algorithm(shared_proxy: ProxyProcess) -> None:
    with Client(shared_proxy.url) as client:
        seconds: list[float] = []
        for _ in range(20):
            started = time.perf_counter()
            client.info()
            seconds.append(time.perf_counter() - started)
    assert statistics.median(seconds) < 0.03  # a delayed acknowledgement takes 40 ms


# ---------------------------------------------------------------- what keeps it from starting


def test_a_port_that_is_taken_is_said_to_be(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        said = one_line(refused("--port", port, "--data-dir", str(tmp_path)))
    assert f"port {port} on 127.0.0.1 is taken" in said
    assert "--port" in said


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_said_not_to_be(tmp_path: Path, host: str, port: int) -> None:
    said = one_line(refused("--host", host, "--insecure", "--port", str(port), "--data-dir", str(tmp_path)))
    assert host in said
    assert "--host" in said


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path, port: int) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "data"
    said = one_line(refused("--port", str(port), "--data-dir", str(folder)))
    assert str(folder) in said
    assert "--data-dir" in said


def test_a_folder_that_is_not_writable_is_named(port: int, tmp_path: Path) -> None:
    command = popgate_command("serve", "--port", str(port), "--data-dir", "/")
    if os.geteuid() == 0:  # root writes everywhere
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv here to become somebody else than root")
        command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *command]
        probe = subprocess.run([*command[:7], "-c", "pass"], capture_output=True, check=False, cwd="/")
        if probe.returncode != 0:
            pytest.skip("others than root can't run this interpreter")
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS_MAX, check=False, cwd="/")
    assert done.returncode == 1
    assert "the data folder / is not writable" in one_line(done.stderr)
    assert "--data-dir" in done.stderr


def test_a_second_process_on_the_same_folder_is_refused_and_the_first_goes_on(
    own_proxy: ProxyProcess, port: int
) -> None:
    said = one_line(refused("--port", str(port), "--data-dir", str(own_proxy.data_folder)))
    assert str(own_proxy.data_folder) in said
    assert f"pid {own_proxy.pid}" in said
    assert own_proxy.client.get("/readyz").is_success


@pytest.mark.parametrize("content", [b"this is no database" * 500, b"SQLite format 3\0" + b"\xff" * 10_000])
def test_a_data_file_that_is_damaged_is_named_and_left_as_it_is(tmp_path: Path, port: int, content: bytes) -> None:
    file = tmp_path / "popgate.db"
    file.write_bytes(content)
    assert str(file) in one_line(refused("--port", str(port), "--data-dir", str(tmp_path)))
    assert file.read_bytes() == content


def test_a_damaged_secret_is_named(tmp_path: Path, port: int) -> None:
    (tmp_path / "secret").write_text("too short")
    said = one_line(refused("--port", str(port), "--data-dir", str(tmp_path)))
    assert str(tmp_path / "secret") in said


def test_a_broker_that_is_absent_is_named_without_its_password(tmp_path: Path, port: int) -> None:
    nowhere = "amqp://somebody:hunter2@127.0.0.1:1/"
    said = one_line(refused("--port", str(port), "--data-dir", str(tmp_path), "--amqp-url", nowhere))
    assert "127.0.0.1:1" in said
    assert "hunter2" not in said


def test_a_broker_that_refuses_the_user_is_named(tmp_path: Path, port: int, rabbitmq: RabbitNode) -> None:
    url = f"amqp://somebody:hunter2@127.0.0.1:{rabbitmq.amqp_port}/"
    said = one_line(refused("--port", str(port), "--data-dir", str(tmp_path), "--amqp-url", url))
    assert "somebody" in said
    assert "hunter2" not in said


def test_a_wrong_configuration_is_said_completely_and_nothing_is_made(tmp_path: Path) -> None:
    file = tmp_path / "popgate.toml"
    file.write_text("prot = 1\nbuffer_bytes_max = 'much'\n")
    folder = tmp_path / "data"
    arguments = ("--port", "99999", "--data-dir", str(folder), "--config", str(file))
    said = refused(*arguments, environment={"POPGATE_LOG_LEVEL": "loud"}, code=2)
    for wrong in ("--port", "POPGATE_LOG_LEVEL", "buffer_bytes_max in", "prot in"):
        assert wrong in said
    assert len(said.splitlines()) == 5
    assert not folder.exists()


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "popgate.toml").write_text("port = 'x'")
    assert "port in" in refused(environment={"POPGATE_CONFIG": str(tmp_path / "popgate.toml")}, code=2)


# ---------------------------------------------------------------- how it ends


def ends(proxy: ProxyProcess, *, within_seconds: float = EXIT_SECONDS_MAX) -> int:
    """Return the exit code of a proxy that was asked to end. Raises: ServerFailedError if it takes longer."""
    return proxy.wait(within_seconds)


def _parked(proxy: ProxyProcess) -> str:
    """The metric of the topic that `parked_pops` pops from."""
    lines = proxy.client.get("/metrics").text.splitlines()
    return next((line for line in lines if line.startswith("popgate_parked_pops{") and 'topic="t"' in line), "")


@contextmanager
def parked_pops(proxy: ProxyProcess, count: int) -> Generator[list[httpx.Response]]:
    """Run this many waiting pops; after the block, return their answers, or the exceptions that ended them."""
    answers: list[httpx.Response] = []

    def pop() -> httpx.Response:
        return httpx.post(f"{proxy.url}/v1/topics/t/groups/g/pop", json={"wait_seconds": 30}, timeout=40)

    with ThreadPoolExecutor(count) as threads:
        waiting = [threads.submit(pop) for _ in range(count)]
        wait_until(lambda: f" {count}.0" in _parked(proxy), timeout_seconds=20, what="the pops to be parked")
        yield answers
        answers += [one.result() for one in waiting]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_answers_parked_pops_and_ends_it_within_two_seconds(
    own_proxy: ProxyProcess, number: signal.Signals
) -> None:
    with parked_pops(own_proxy, 20) as answers:
        own_proxy.signal(number)
        assert ends(own_proxy) == 0
    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, {"messages": []})] * 20
    assert "Traceback" not in own_proxy.output


def test_on_rabbitmq_too_and_what_was_buffered_is_back(tmp_path: Path, amqp_url: str, rabbitmq: RabbitNode) -> None:
    with ProxyProcess(tmp_path / "proxy", "--amqp-url", amqp_url, "--auto-create", "true") as proxy:
        popgate = CommandLine(proxy.url)
        assert popgate("publish", "orders", *map(str, range(100))).code == 0
        handle = popgate("pop", "orders", "--wait-seconds", "10", "--invisibility-seconds", "600").rows[0][
            "receipt_handle"
        ]
        with parked_pops(proxy, 5) as answers:
            proxy.signal(signal.SIGTERM)
            assert ends(proxy) == 0
        assert [answer.status_code for answer in answers] == [200] * 5
        vhost = amqp_url.rpartition("/")[2]

        def ready() -> int:
            return sum(queue.get("messages_ready", 0) for queue in rabbitmq.queues(vhost))

        wait_until(lambda: ready() == 100, timeout_seconds=10, what="all messages to be ready at RabbitMQ")
        proxy.start()  # the lease has lived on
        assert popgate("ack", "orders", "default", handle).rows == [{"receipt_handle": handle, "status": "acked"}]
        assert len(popgate("pop", "orders", "--max-messages", "200", "--wait-seconds", "10", "--ack").rows) == 99


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(own_proxy: ProxyProcess, number: signal.Signals) -> None:
    with socket.create_connection(("127.0.0.1", own_proxy.port)) as slow:
        # A request without end holds the first exit back.
        slow.sendall(b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
        with parked_pops(own_proxy, 1):
            own_proxy.signal(number)
        # Its answer says that the first signal has been taken.
        assert own_proxy.is_running()
        own_proxy.signal(number)
        assert ends(own_proxy, within_seconds=0.5) == 128 + number


def test_a_request_without_end_does_not_hold_it_for_more_than_two_seconds(own_proxy: ProxyProcess) -> None:
    with socket.create_connection(("127.0.0.1", own_proxy.port)) as slow:
        slow.sendall(b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
        time.sleep(0.2)  # a request that has not arrived by then holds nothing
        own_proxy.signal(signal.SIGTERM)
        assert ends(own_proxy) == 0
    assert "Traceback" not in own_proxy.output


def test_idle_connections_do_not_hold_it(own_proxy: ProxyProcess) -> None:
    with httpx.Client(base_url=own_proxy.url) as client, socket.create_connection(("127.0.0.1", own_proxy.port)):
        client.get("/v1")
        started = time.monotonic()
        own_proxy.signal(signal.SIGTERM)
        assert ends(own_proxy) == 0
        assert time.monotonic() - started < EXIT_SECONDS_MAX


def test_a_rabbitmq_that_hangs_does_not_hold_it(tmp_path: Path, amqp_url: str, rabbitmq: RabbitNode) -> None:
    with ProxyProcess(tmp_path / "proxy", "--amqp-url", amqp_url, "--auto-create", "true") as proxy:
        popgate = CommandLine(proxy.url)
        assert popgate("publish", "orders", "a", "b").code == 0
        assert popgate("pop", "orders", "--wait-seconds", "10").code == 0
        try:
            with parked_pops(proxy, 2):
                rabbitmq.pause()
                proxy.signal(signal.SIGTERM)
                assert ends(proxy) == 0
        finally:
            rabbitmq.resume()
        assert "Traceback" not in proxy.output


def test_a_signal_ends_it_while_it_still_waits_for_a_silent_broker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://127.0.0.1:{silent.getsockname()[1]}/"
        proxy = ProxyProcess(tmp_path / "proxy", "--amqp-url", url)
        try:
            proxy.launch()
            connection, _ = silent.accept()
            with connection:
                proxy.signal(signal.SIGTERM)
                assert ends(proxy) == 0
        finally:
            proxy.close()
        assert "Traceback" not in proxy.output
