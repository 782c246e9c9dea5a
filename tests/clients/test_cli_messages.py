"""`popgate publish`, `ack` and similar commands, as programs against a real proxy. `pop` has its own module."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from popgate_client import Client
from support.command_line import CommandLine, ended
from support.processes import wait_until
from support.proxy import ProxyProcess, popgate_command

GROUP = "default"
MEMORY_KIB_MAX = 150 * 1024


@pytest.fixture
def stats(client: Client, topic: str) -> Callable[[], dict[str, Any]]:
    """The counts of the test's own topic."""
    return lambda: client.stats(topic, GROUP)


@pytest.fixture
def leased(client: Client, topic: str) -> Callable[[str], str]:
    """`leased("body")` publishes a message, pops it, and returns its receipt handle."""

    def publish_and_pop(body: str) -> str:
        client.publish(topic, body)
        return client.pop(topic, GROUP, wait_seconds=5)[0].receipt_handle

    return publish_and_pop


# ---------------------------------------------------------------- publish


def test_publish_pop_and_ack_in_a_pipe(popgate: CommandLine, topic: str, stats: Callable[[], dict[str, Any]]) -> None:
    published = popgate("publish", topic, "hello", "wörld", "--header", "a=1", "--header", "b=x=y")
    assert (published.code, published.out) == (0, "")
    assert f"published 2 to {topic}" in published.err
    acked = popgate.shell(
        f"popgate pop {topic} {GROUP} --max-messages 10 --wait-seconds 5 | popgate ack {topic} {GROUP}"
    )
    assert (acked.code, acked.err) == (0, "")
    assert [row["status"] for row in acked.rows] == ["acked", "acked"]
    assert (stats()["ready"], stats()["in_flight"]) == (0, 0)


def test_every_line_is_a_message_byte_for_byte(popgate: CommandLine, topic: str) -> None:
    lines = [b"one", b"", b" two \r", b"\xff\x00\xfe", "grüße".encode(), b"no newline at the end"]
    assert popgate("publish", topic, stdin=b"\n".join(lines)).code == 0
    assert sorted(popgate("pop", topic, "--max-messages", "100", "--ack").bodies) == sorted(lines)


def test_a_whole_input_is_one_message(popgate: CommandLine, topic: str) -> None:
    data = bytes(range(256)) * 4_000 + b"\n\n"
    assert popgate("publish", topic, "--whole", "--message-id", "blob", stdin=data).code == 0
    assert popgate("pop", topic, "--max-messages", "2", "--ack").bodies == [data]


def test_bad_lines_are_named_and_all_others_are_published(popgate: CommandLine, topic: str) -> None:
    lines = [
        '{"body":"one","headers":{"n":1,"b":true},"ordering_key":"k","message_id":"m-1"}',
        "{",
        '{"body":"refused by the server","headers":{"x-popgate-mine":1}}',
        "",
        '{"body_base64":"/w=="}',
        '{"boddy":"x"}',
    ]
    done = popgate("publish", topic, "--json-lines", stdin="\n".join(lines))
    assert done.code == 1
    assert {row["number"]: row["error"]["code"] for row in done.rows} == {
        2: "invalid_line",
        3: "invalid_request",
        6: "invalid_line",
    }
    assert "published 2" in done.err
    assert "3 failed" in done.err
    popped = popgate("pop", topic, "--max-messages", "10", "--ack")
    assert sorted(popped.bodies) == [b"one", b"\xff"]
    assert {"n": 1, "b": True} in [row["headers"] for row in popped.rows]


def test_a_dedup_id_is_published_once(popgate: CommandLine, topic: str) -> None:
    for expected in ("published 1 to", "including 1 duplicates"):
        done = popgate("publish", topic, "order 17", "--dedup-id", "order-17")
        assert (done.code, done.out) == (0, "")
        assert expected in done.err
        assert re.search(r", message id \w+$", done.err.rstrip()), "explain can find it"
    lines = [f'{{"body":"{body}","dedup_id":"{body}"}}' for body in ("order-17", "order-18", "order-18")]
    done = popgate("publish", topic, "--json-lines", stdin="\n".join(lines))
    assert done.code == 0
    assert "published 3" in done.err
    assert "including 2 duplicates" in done.err
    assert sorted(popgate("pop", topic, "--max-messages", "10", "--ack").bodies) == [b"order 17", b"order-18"]


def test_a_delayed_message_comes_when_its_time_has_come(popgate: CommandLine, topic: str) -> None:
    assert popgate("publish", topic, "--json-lines", stdin='{"body":"much later","delay_seconds":3600}').code == 0
    before = time.time()
    assert popgate("publish", topic, "later", "--delay-seconds", "3").code == 0
    assert popgate("pop", topic).rows == []
    assert popgate("pop", topic, "--max-messages", "9", "--wait-seconds", "10", "--ack").bodies == [b"later"]
    assert before + 3 <= time.time() < before + 9


def test_a_message_whose_time_to_live_is_over_is_discarded(popgate: CommandLine, topic: str) -> None:
    assert popgate("publish", topic, "short", "--ttl-seconds", "0.5").code == 0
    assert popgate("publish", topic, "long", "--ttl-seconds", "3600").code == 0
    lines = '{"body":"short, too","ttl_seconds":0.5}\n{"body":"its own","ttl_seconds":3600}'
    assert popgate("publish", topic, "--json-lines", "--ttl-seconds", "0.5", stdin=lines).code == 0
    time.sleep(0.6)
    assert sorted(popgate("pop", topic, "--max-messages", "9", "--ack").bodies) == [b"its own", b"long"]
    refused = popgate("publish", topic, "a", "--ttl-seconds", "0")
    assert (refused.code, "ttl_seconds" in refused.out + refused.err) == (1, True)


def test_an_id_is_for_a_single_message(popgate: CommandLine, topic: str) -> None:
    for flag in ("--dedup-id", "--message-id"):
        done = popgate("publish", topic, "a", "b", flag, "x")
        assert done.code == 2
        assert f"{flag} is for a single message" in done.err


def test_what_was_popped_can_be_published_elsewhere(popgate: CommandLine, topic: str, client: Client) -> None:
    client.publish(topic, "a", b"\xff")
    copied = popgate.shell(
        f"popgate pop {topic} --max-messages 2 --wait-seconds 5 | popgate publish {topic}-copy --json-lines"
    )
    assert (copied.code, copied.out) == (0, "")
    copies = client.pop(f"{topic}-copy", GROUP, max_messages=9, wait_seconds=5)
    assert sorted(copy.body for copy in copies) == [b"a", b"\xff"]


def test_thousands_of_lines_arrive_once_each(popgate: CommandLine, topic: str) -> None:
    lines = [b"%d" % number for number in range(6_000)]
    assert popgate("publish", topic, stdin=b"\n".join(lines)).code == 0
    assert sorted(popgate("pop", topic, "--max-messages", "9000", "--ack").bodies) == sorted(lines)


def test_messages_with_an_ordering_key_keep_their_order(popgate: CommandLine, topic: str) -> None:
    lines = [b"%d" % number for number in range(1_000)]
    assert popgate("publish", topic, "--ordering-key", "k", stdin=b"\n".join(lines)).code == 0
    assert popgate("pop", topic, "--max-messages", "5000", "--ack").bodies == lines


def test_a_line_goes_at_once_though_standard_input_stays_open(popgate: CommandLine, topic: str, client: Client) -> None:
    with popgate.running("publish", topic) as process:
        assert process.stdin is not None
        for line in (b"first", b"second"):
            process.stdin.write(line + b"\n")
            wait_until(lambda: client.pop(topic, GROUP, wait_seconds=1) != [], timeout_seconds=10, what="the line")
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert done.code == 130
    assert done.err == f"popgate: {done.err.strip().removeprefix('popgate: ')}\n"
    assert "published 2" in done.err


def test_an_endless_line_is_refused_in_bounded_memory(popgate: CommandLine, topic: str) -> None:
    script = """if True:
        import os, sys
        _, status, usage = os.wait4(os.posix_spawn(sys.executable, sys.argv[1:], os.environ), 0)
        print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
    """
    command = [sys.executable, "-c", script, *popgate_command("publish", topic)]
    zeros = subprocess.Popen(["head", "-c", str(300 << 20), "/dev/zero"], stdout=subprocess.PIPE)
    done = subprocess.run(command, stdin=zeros.stdout, capture_output=True, env=popgate.environment, check=True)
    assert zeros.stdout is not None
    zeros.stdout.close()
    zeros.wait()
    code, memory_kib = map(int, done.stdout.splitlines()[-1].split())
    assert b"message_too_large" in done.stdout
    assert (code, memory_kib < MEMORY_KIB_MAX) == (1, True), memory_kib


# ---------------------------------------------------------------- ack, release, extend, reject


def test_the_status_of_each_handle_is_printed_and_a_bad_one_fails(
    popgate: CommandLine, topic: str, leased: Callable[[str], str]
) -> None:
    handle = leased("a")
    done = popgate("ack", topic, GROUP, handle, "forged")
    assert done.code == 1
    assert done.rows == [
        {"receipt_handle": handle, "status": "acked"},
        {"receipt_handle": "forged", "status": "invalid"},
    ]
    again = popgate("ack", topic, GROUP, "--output", "table", stdin=f"\n {handle} \n")
    assert (again.code, again.out.split()) == (0, ["STATUS", "RECEIPT", "HANDLE", "already_acked", handle])


def test_lines_without_a_handle_are_named_and_the_others_are_acked(
    popgate: CommandLine, topic: str, leased: Callable[[str], str]
) -> None:
    handle = leased("a")
    lines = ["two words", handle, '{"receipt_handle":5}', "{", '["x"]']
    done = popgate("ack", topic, GROUP, stdin="\n".join(lines))
    assert done.code == 1
    assert done.rows[0] == {"receipt_handle": handle, "status": "acked"}
    for number in (1, 3, 4):
        assert f"popgate: line {number} contains no receipt handle\n" in done.err


def test_release_extend_and_reject_do_what_they_say(
    popgate: CommandLine, topic: str, leased: Callable[[str], str], stats: Callable[[], dict[str, Any]]
) -> None:
    handle = leased("a")
    (extended,) = popgate("extend", topic, GROUP, handle, "--invisibility-seconds", "600").rows
    assert extended["status"] == "extended"
    assert 500 < extended["invisible_until"] - time.time() < 700
    assert popgate("release", topic, GROUP, handle, "--delay-seconds", "3600").rows[0]["status"] == "released"
    assert stats()["delayed"] == 1
    assert popgate("reject", topic, GROUP, leased("b"), "--reason", "bad").rows[0]["status"] == "rejected"
    assert stats()["dead"] == 1


def test_a_release_and_a_rejection_say_why(popgate: CommandLine, topic: str, leased: Callable[[str], str]) -> None:
    error = ("--error-type", "LookupError", "--client-id", "w-7", "--error-text")
    done = popgate(
        "release", topic, GROUP, leased("a"), "--delay-seconds", "0", "--reason", "busy", *error, "x" * 9_999
    )
    assert done.rows[0]["status"] == "released"
    (again,) = popgate("pop", topic, GROUP, "--wait-seconds", "10", "--client-id", "w-8").rows
    assert popgate("reject", topic, GROUP, again["receipt_handle"], "--error-text", "no such customer").code == 0
    (letter,) = popgate("dead-letters", "list", topic, GROUP).rows
    assert letter["error"] == {"type": "", "text": "no such customer"}
    assert letter["client"] == "w-8"
    first = letter["attempts"][0]
    assert (first["client"], first["error_type"], first["error_text"]) == ("w-7", "LookupError", "x" * 500)
    shown = popgate("dead-letters", "show", topic, GROUP, letter["id"], "-o", "table").out
    assert "released by w-7 at " in shown
    assert ": busy: LookupError: xxx" in shown
    wrong = popgate("reject", topic, GROUP, "handle", "--client-id", "two words")
    assert (wrong.code, "client_id" in wrong.err) == (2, True)


# ---------------------------------------------------------------- when it can't be done


@pytest.fixture
def strict_proxy(tmp_path: Path) -> Iterator[ProxyProcess]:
    """A separate proxy for the test that does not create topics or groups on use."""
    with ProxyProcess(tmp_path / "proxy", "--auto-create", "false") as proxy:
        yield proxy


def test_what_is_missing_is_named_with_the_command_that_makes_it(strict_proxy: ProxyProcess) -> None:
    popgate = CommandLine(strict_proxy.url)
    published = popgate("publish", "orders", "a", "b")
    assert published.code == 1
    assert [row["error"]["code"] for row in published.rows] == ["topic_not_found"] * 2
    popped = popgate("pop", "orders", "billing")
    assert (popped.code, len(popped.err.splitlines())) == (1, 1)
    assert "create it with: popgate topics create orders --queues 4" in popped.err
    assert popgate("topics", "create", "orders", "--queues", "1").code == 0
    popped = popgate("pop", "orders", "billing")
    assert "create it with: popgate groups create orders billing" in popped.err
    nobody = popgate("publish", "orders", "a")
    assert (nobody.code, nobody.rows[0]["error"]["code"]) == (1, "no_subscribers")


def test_a_name_that_can_not_be_is_wrong_usage(popgate: CommandLine) -> None:
    done = popgate("pop", "no such name!")
    assert done.code == 2
    assert "topic" in done.err


def test_a_server_that_is_not_there_is_exit_code_3(topic: str) -> None:
    popgate = CommandLine("http://127.0.0.1:1")
    for command in (["pop", topic], ["publish", topic, "x"], ["tail", topic]):
        done = popgate(*command, "--timeout-seconds", "0")
        assert done.code == 3
        last = done.err.splitlines()[-1]
        assert last.startswith("popgate: ")
        assert "http://127.0.0.1:1" in last


def test_a_server_that_is_away_for_a_while_is_waited_for(own_proxy: ProxyProcess) -> None:
    popgate = CommandLine(own_proxy.url)
    own_proxy.stop()
    with popgate.running("publish", "orders", "patient", "--timeout-seconds", "30") as process:
        own_proxy.start()
        assert ended(process).code == 0
    assert popgate("pop", "orders", "--wait-seconds", "5", "--ack").bodies == [b"patient"]


def test_when_the_server_goes_what_was_not_published_is_reported(own_proxy: ProxyProcess) -> None:
    popgate = CommandLine(own_proxy.url)
    with popgate.running("publish", "orders", "--timeout-seconds", "0.2") as process:
        assert process.stdin is not None
        process.stdin.write(b"first\n")
        with Client(own_proxy.url) as client:
            wait_until(
                lambda: client.pop("orders", GROUP, wait_seconds=1) != [], timeout_seconds=10, what="the first message"
            )
        own_proxy.kill()
        process.stdin.write(b"second\n")
        done = ended(process)
    assert done.code == 3
    assert [(row["number"], row["status"]) for row in done.rows] == [(2, "failed")]
    assert "published 1" in done.err
