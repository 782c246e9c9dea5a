"""`popgate pop`, as a program against a real proxy."""

import os
import pty
import signal
import subprocess
import time

from popgate_client import Client, OutgoingMessage
from support.command_line import CommandLine, ended
from support.proxy import popgate_command

GROUP = "default"


def test_a_popped_message_has_the_fields_of_the_http_interface(popgate: CommandLine, topic: str) -> None:
    popgate("publish", topic, "hello", "--message-id", "m-1", "--ordering-key", "k", "--header", "a=1")
    (row,) = popgate("pop", topic, "--wait-seconds", "5", "--invisibility-seconds", "60").rows
    assert (row["message_id"], row["body"], row["ordering_key"], row["headers"]) == ("m-1", "hello", "k", {"a": "1"})
    assert row["delivery_count"] == 1
    assert 50 < row["invisible_until"] - time.time() < 70
    assert {"receipt_handle", "queue", "published_at", "first_delivered_at"} <= row.keys()


def test_a_pop_without_a_message_says_so_and_is_no_failure(popgate: CommandLine, topic: str) -> None:
    assert popgate("pop", topic) == (0, "", f"popgate: no message for default on {topic}\n")
    assert popgate("pop", topic, "-q") == (0, "", "")


def test_a_pop_waits_for_its_first_message_only(popgate: CommandLine, topic: str, client: Client) -> None:
    with popgate.running("pop", topic, "--wait-seconds", "40", "--max-messages", "100") as process:
        time.sleep(0.5)  # or it would not have to wait; the test is true all the same
        client.publish(topic, "late")
        started = time.monotonic()
        assert ended(process).bodies == [b"late"]
        assert time.monotonic() - started < 10


def test_a_group_that_is_full_after_the_first_batch_is_no_failure(
    popgate: CommandLine, topic: str, client: Client
) -> None:
    client.publish(topic, *"abcde")
    client.put_group(topic, GROUP, max_in_flight=2)
    popped = popgate("pop", topic, GROUP, "--max-messages", "100", "--wait-seconds", "5")
    assert (popped.code, len(popped.rows)) == (0, 2)
    assert popped.err.startswith("popgate: only 2 messages for now: ")
    assert "max_in_flight" in popped.err
    assert popgate("pop", topic, GROUP, "--max-messages", "100").code == 1, "nothing was to be had at all"
    assert popgate("ack", topic, GROUP, stdin=popped.out).code == 0
    assert len(popgate("pop", topic, GROUP, "--max-messages", "100", "--ack").rows) == 3, "what is acked makes room"


def test_ctrl_c_ends_a_waiting_pop_without_a_word(popgate: CommandLine, topic: str) -> None:
    with popgate.running("pop", topic, "--wait-seconds", "30") as process:
        time.sleep(1)  # Ctrl-C at any other moment ends it in the same way
        process.send_signal(signal.SIGINT)
        assert ended(process) == (130, "", "")


def test_a_message_is_not_acked_before_it_is_printed(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, "precious")
    done = popgate.shell(f"popgate pop {topic} --ack --wait-seconds 5 > /dev/full")
    assert done == (1, "", "popgate: can't write the output: No space left on device\n")
    (message,) = client.pop(topic, GROUP, wait_seconds=5)  # given back, long before its lease ends
    assert message.text == "precious"


def test_a_reader_that_has_gone_ends_it_quietly(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, *["x" * 1_000] * 1_000)
    done = popgate.shell(f"popgate pop {topic} --max-messages 1000 --wait-seconds 5 | head -c 100")
    assert (done.code, len(done.out), done.err) == (141, 100, "")


def test_on_a_terminal_it_is_a_table(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, "hello \x1b[31mred")
    controller, terminal = pty.openpty()
    done = subprocess.run(
        popgate_command("pop", topic, "--wait-seconds", "5", "--ack"),
        stdout=terminal,
        env=popgate.environment,
        check=False,
    )
    os.close(terminal)
    lines = os.read(controller, 10_000).decode().splitlines()
    os.close(controller)
    assert done.returncode == 0
    assert lines[0].split() == ["MESSAGE", "ID", "QUEUE", "COUNT", "AGE", "BODY"]
    assert lines[1].endswith("hello \\x1b[31mred")


# ---------------------------------------------------------------- filters


def test_a_pop_with_filters_leaves_the_others(popgate: CommandLine, topic: str) -> None:
    for kind in ("plain", "express", "urgent"):
        assert popgate("publish", topic, kind, "--header", f"kind={kind}").code == 0
    filters = ["--filter", "kind=express", "--filter", "kind=urgent"]
    assert popgate("pop", topic, "--max-messages", "9", "--wait-seconds", "5", "--ack", *filters).bodies == [
        b"express",
        b"urgent",
    ]
    assert popgate("pop", topic, "--max-messages", "9", "--wait-seconds", "5", "--ack").bodies == [b"plain"]


def test_a_filter_as_json_knows_numbers_truth_values_and_absence(
    popgate: CommandLine, topic: str, client: Client
) -> None:
    headers: dict[str, dict[str, object]] = {
        "zero": {"retries": 0},
        "one": {"retries": 1, "vip": True},
        "text": {"retries": "1"},
        "none": {},
    }
    client.publish(topic, *(OutgoingMessage(body=body, headers=one) for body, one in headers.items()))

    def passing(*filters: str) -> list[bytes]:
        popped = popgate("pop", topic, "--max-messages", "9", *filters)
        assert popped.code == 0
        client.release(topic, GROUP, [row["receipt_handle"] for row in popped.rows], delay_seconds=0)
        return sorted(popped.bodies)

    assert passing("--filter-json", '{"retries": [0, 1]}') == [b"one", b"zero"]
    assert passing("--filter-json", '{"retries": [1, "1"], "vip": true}') == [b"one"]
    assert passing("--filter-json", '{"retries": null}') == [b"none"]
    assert passing("--filter", "retries=1", "--filter-json", '{"retries": 0}') == [b"text", b"zero"]
    assert passing("--filter-json", '{"retries": "1"}', "--filter-json", '{"vip": null}') == [b"text"]
    refused = popgate("pop", topic, "--filter-json", '{"retries": {"at": 1}}')
    assert (refused.code, refused.out, "filter" in refused.err) == (2, "", True)
