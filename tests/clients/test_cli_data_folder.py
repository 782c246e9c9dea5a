"""A data folder belongs to one broker: its records are not valid for another broker's messages."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import ServerFailedError
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode


@pytest.fixture
def other_url(rabbitmq: RabbitNode) -> Iterator[str]:
    """Another virtual host of the same RabbitMQ."""
    vhost = f"other-{secrets.token_hex(4)}"
    rabbitmq.add_vhost(vhost)
    yield rabbitmq.amqp_url(vhost)
    rabbitmq.delete_vhost(vhost)


def serve_once(folder: Path, *flags: str) -> str:
    """Start and stop a proxy on the folder; return its output."""
    with ProxyProcess(folder, *flags, data_folder=folder / "data") as proxy:
        proxy.stop()
        return proxy.output


def refusal(folder: Path, *flags: str) -> str:
    with pytest.raises(ServerFailedError) as failed:
        serve_once(folder, *flags)
    return str(failed.value)


def test_a_folder_may_be_used_again_with_its_broker(tmp_path: Path, amqp_url: str) -> None:
    for _ in range(2):
        assert "on RabbitMQ" in serve_once(tmp_path, "--amqp-url", amqp_url)


def test_a_folder_of_one_virtual_host_is_refused_on_another(tmp_path: Path, amqp_url: str, other_url: str) -> None:
    serve_once(tmp_path, "--amqp-url", amqp_url)
    said = refusal(tmp_path, "--amqp-url", other_url)
    assert "another RabbitMQ or virtual host" in said
    assert "--data-dir" in said
    serve_once(tmp_path, "--amqp-url", amqp_url)


def test_a_folder_is_either_embedded_or_on_rabbitmq(tmp_path: Path, amqp_url: str) -> None:
    serve_once(tmp_path / "a")
    assert "holds the messages of an embedded popgate" in refusal(tmp_path / "a", "--amqp-url", amqp_url)
    serve_once(tmp_path / "b", "--amqp-url", amqp_url)
    assert "give --amqp-url" in refusal(tmp_path / "b")
