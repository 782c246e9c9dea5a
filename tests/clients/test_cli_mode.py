"""`popgate mode`: shows how a group is consumed, previews a switch, and waits until all proxies serve it."""

import signal

import pytest

from popgate_client import Client
from support.command_line import CommandLine, ended
from support.processes import wait_until

GROUP = "default"


@pytest.fixture
def leased(client: Client, topic: str) -> str:
    """A topic with a message that is leased for a long time."""
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP)
    client.publish(topic, "a")
    assert client.pop(topic, GROUP, wait_seconds=5, invisibility_seconds=600)
    return topic


def mode(client: Client, topic: str) -> str:
    return str(client.consume_mode(topic, GROUP)["mode"])


def test_a_mode_is_shown_previewed_and_switched(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, "a")
    (shown,) = popgate("mode", topic, GROUP).rows
    assert (shown["mode"], shown["generation"], shown["converged"]) == ("pop", 1, True)
    preview = popgate("mode", topic, GROUP, "pull", "--drain-timeout-seconds", "7", "--dry-run")
    assert preview.rows[0]["preview"]["steps"] == ["draining", "pull"]
    table = popgate("mode", topic, GROUP, "pull", "--dry-run", "--output", "table").out.splitlines()
    assert table[0].split()[:2] == ["MODE", "THEN"]
    assert table[1].split() == ["pop", "draining,", "pull", "1m", "0s", "0", "0", "0", "4"]
    assert mode(client, topic) == "pop"
    (switched,) = popgate("mode", topic, GROUP, "pull").rows
    assert (switched["mode"], switched["converged"]) == ("pull", True)
    table = popgate("mode", topic, GROUP, "pop", "--output", "table").out.splitlines()
    assert table[1].split() == [topic, GROUP, "pop", "pop", "4", "-", "-", "all", "1"]


def test_a_switch_waits_for_its_drain_and_ctrl_c_ends_only_the_wait(
    popgate: CommandLine, leased: str, client: Client
) -> None:
    with popgate.running("mode", leased, GROUP, "pull", "--drain-timeout-seconds", "600") as process:
        wait_until(lambda: mode(client, leased) == "draining", timeout_seconds=10, what="the drain")
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert (done.code, done.out) == (130, "")
    assert f"undo it with: popgate mode {leased} {GROUP} pop" in done.err
    (going_on,) = popgate("mode", leased, GROUP, "pull", "--no-wait").rows
    assert (going_on["mode"], going_on["drain"]["leases_left"]) == ("draining", 1)
    table = popgate("mode", leased, GROUP, "--output", "table").out.splitlines()
    assert table[1].split()[2:6] == ["draining", "pull", "2", "1"]
    (cut,) = popgate("mode", leased, GROUP, "pull", "--drain-timeout-seconds", "0").rows
    assert (cut["mode"], cut["generation"]) == ("pull", 3)


def test_who_waits_is_told_that_somebody_went_back(popgate: CommandLine, leased: str, client: Client) -> None:
    with popgate.running("mode", leased, GROUP, "pull") as process:
        wait_until(lambda: mode(client, leased) == "draining", timeout_seconds=10, what="the drain")
        client.set_consume_mode(leased, GROUP, "pop")
        done = ended(process)
    assert (done.code, done.out) == (1, "")
    assert "switched it back to pop" in done.err


def test_what_can_not_be_meant_is_refused(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, "a")
    done = popgate("mode", topic, GROUP, "--dry-run")
    assert (done.code, "pop or pull" in done.err) == (2, True)
    assert popgate("mode", topic, GROUP, "draining").code == 2
    assert popgate("mode", topic, "none", "pull").code == 1
