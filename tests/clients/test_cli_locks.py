"""`popgate locks`, as a program against a real proxy: commands run under a lock, and its administration."""

import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from popgate.cli.commands import run
from popgate_client import Client
from support.command_line import CommandLine, Done, ended
from support.processes import wait_until
from support.proxy import ProxyProcess, popgate_command

GUARDED = "exec 2>/dev/null; trap 'echo ended; exit 7' TERM INT; echo ready; while :; do sleep 0.05; done"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
TWO = "sh -c 'echo $$; exec sleep 60' & wait"
"""Prints the ID of a child process, which survives if only the program itself is ended."""
PTY = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.fixture
def name() -> str:
    """The name of a lock that no other test uses."""
    return f"lock-{secrets.token_hex(4)}"


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def holders(client: Client, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get_lock(name)["holders"]
    return found


def is_lost(done: Done, name: str) -> bool:
    return done.code == 76 and done.err.startswith(f"popgate: lost lock {name}, ") and len(done.err.splitlines()) == 1


# ---------------------------------------------------------------- a command under a lock


def test_a_command_runs_while_the_lock_is_held_and_its_exit_code_is_kept(
    popgate: CommandLine, client: Client, name: str
) -> None:
    acquire = ("locks", "acquire", name, "--holder", "billing-7", "--ttl-seconds", "1")
    script = 'echo "$POPGATE_LOCK $POPGATE_FENCING_TOKEN"; read line; exit 5'
    with popgate.running(*acquire, "--exec", "sh", "-c", script) as process:
        lock, token = first_line(process).split()
        (holder,) = holders(client, name)
        assert (lock, int(token), holder["holder"]) == (name, holder["fencing_token"], "billing-7")
        refused = popgate("locks", "acquire", name, "--exec", "echo", "never")
        assert refused == (75, "", f"popgate: lock {name} is held by others; the command was not run\n")
        out, err = process.communicate(b"\n", timeout=20)
    assert (process.returncode, out, err) == (5, b"", b"")
    assert holders(client, name) == []
    assert popgate("locks", "acquire", name, "--exec", "echo", "--url", "x", "--") == (0, "--url x --\n", "")


def test_a_command_that_a_signal_has_ended_is_told_as_shells_do(popgate: CommandLine, name: str) -> None:
    assert popgate("locks", "acquire", name, "--exec", "sh", "-c", "kill -9 $$").code == 128 + 9


def test_a_command_that_can_not_be_run_frees_the_lock(
    popgate: CommandLine, client: Client, name: str, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for command, code in (("no-such-command", 127), (str(plain), 126)):
        done = popgate("locks", "acquire", name, "--exec", command)
        assert (done.code, done.out, len(done.err.splitlines())) == (code, "", 1)
        assert f"can't run '{command}'" in done.err
    assert holders(client, name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_passes_to_the_command_and_the_lock_is_released(
    popgate: CommandLine, client: Client, name: str, number: signal.Signals
) -> None:
    with popgate.running("locks", "acquire", name, "--exec", "sh", "-c", GUARDED) as process:
        assert first_line(process) == "ready"
        process.send_signal(number)
        assert ended(process) == (7, "ended\n", "")
    assert holders(client, name) == []


def test_a_signal_ends_the_wait_for_a_lock(popgate: CommandLine, client: Client, name: str) -> None:
    with (
        client.lock(name),
        popgate.running("locks", "acquire", name, "--wait-seconds", "60", "--exec", "echo", "never") as process,
    ):
        wait_until(lambda: client.get_lock(name)["waiting"] == 1, timeout_seconds=10, what="the client in the line")
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (143, "", "")
        wait_until(lambda: client.get_lock(name)["waiting"] == 0, timeout_seconds=10, what="the end of the line")


def test_on_a_terminal_the_command_reads_from_it_and_gets_ctrl_c_once(popgate: CommandLine, name: str) -> None:
    script = 'trap "echo int; exit 7" INT; read line; echo "<$line>"; while :; do sleep 0.05; done'
    command = popgate_command("locks", "acquire", name, "--exec", "sh", "-c", script)
    with subprocess.Popen(
        [sys.executable, "-c", PTY, *command],
        env=popgate.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as terminal:
        assert terminal.stdin is not None
        assert terminal.stdout is not None
        terminal.stdin.write(b"typed\n")
        shown = b""
        while b"<typed>" not in shown:
            shown += terminal.stdout.read(100) or pytest.fail(f"it ended with {shown!r}")
        terminal.stdin.write(b"\x03")
        shown += terminal.communicate(timeout=20)[0]
    assert terminal.returncode == 7
    assert shown.count(b"int\r\n") == 1


# ---------------------------------------------------------------- a lock that is lost


def test_an_operators_release_ends_the_command_and_all_that_it_has_started(
    popgate: CommandLine, client: Client, name: str
) -> None:
    acquire = ("locks", "acquire", name, "--ttl-seconds", "1", "--exec", "sh", "-c", TWO)
    with popgate.running(*acquire) as process:
        left_behind = Path("/proc", first_line(process))
        assert left_behind.exists()
        client.force_release(name)
        done = ended(process)
    assert is_lost(done, name)
    assert "operator" in done.err
    wait_until(lambda: not left_behind.exists(), timeout_seconds=5, what="the end of what the command has started")


def test_a_killed_proxy_ends_even_a_command_that_does_not_listen(own_proxy: ProxyProcess) -> None:
    popgate = CommandLine(own_proxy.url)
    acquire = ("locks", "acquire", "nightly", "--ttl-seconds", "1", "--grace-seconds", "0.2")
    with popgate.running(*acquire, "--exec", "sh", "-c", STUBBORN) as process:
        assert first_line(process) == "ready"
        own_proxy.kill()
        assert is_lost(ended(process), "nightly")


def test_a_popgate_that_stood_still_ends_its_command(popgate: CommandLine, client: Client, name: str) -> None:
    acquire = ("locks", "acquire", name, "--ttl-seconds", "1", "--exec", "sh", "-c", GUARDED)
    with popgate.running(*acquire) as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGSTOP)
        with client.lock(name, wait_seconds=10) as lock:
            process.send_signal(signal.SIGCONT)
            done = ended(process)
            lock.verify()
    assert is_lost(done, name)
    assert done.out == "ended\n"


def test_a_killed_popgate_frees_the_lock_with_its_time(popgate: CommandLine, client: Client, name: str) -> None:
    with popgate.running("locks", "acquire", name, "--ttl-seconds", "1", "--exec", "cat") as process:
        wait_until(lambda: is_held(client, name), timeout_seconds=10, what="the lock to be held")
        process.kill()
        with client.lock(name, wait_seconds=5):
            pass


def is_held(client: Client, name: str) -> bool:
    return any(lock["name"] == name and lock["holders"] for lock in client.locks())


# ---------------------------------------------------------------- administration


@pytest.fixture
def here(
    shared_proxy: ProxyProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs a command in this process, which is faster."""
    monkeypatch.setenv("POPGATE_URL", shared_proxy.url)

    def call(*arguments: str) -> Done:
        code = run(arguments)
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return call


@pytest.fixture
def held(shared_proxy: ProxyProcess, client: Client, name: str) -> Iterator[str]:
    """A semaphore of three with two holders, billing-1 and billing-2."""
    client.put_lock(name, "semaphore", slots=3)
    for holder in ("billing-1", "billing-2\x1b[2J"):
        body = {"holder": holder, "ttl_seconds": 600}
        assert shared_proxy.client.post(f"/v1/locks/{name}/acquire", json=body).json()["acquired"]
    yield name
    client.delete_lock(name)


def test_a_lock_is_made_changed_shown_and_deleted(here: Callable[..., Done], name: str) -> None:
    unknown = here("locks", "set", name, "--slots", "2")
    assert (unknown.code, unknown.out) == (1, "")
    assert f"make it with: popgate locks set {name} --kind mutex" in unknown.err
    (made,) = here("locks", "set", name, "--kind", "semaphore", "--slots", "4").rows
    assert made == {"name": name, "kind": "semaphore", "slots": 4, "enabled": True, "holders": [], "waiting": 0}
    (changed,) = here("locks", "set", name, "--disabled").rows
    assert changed == {**made, "enabled": False}
    assert here("locks", "set", name, "--enabled", "--slots", "2").rows == [{**made, "slots": 2}]
    assert here("locks", "show", name).rows == [{**made, "slots": 2}]
    assert {**made, "slots": 2} in here("locks").rows
    assert here("locks", "set", name, "--kind", "mutex").code == 1
    assert here("locks", "delete", name) == (0, "", f"popgate: deleted {name}\n")
    assert here("locks", "show", name).code == 1


def test_tables_show_who_holds_it(here: Callable[..., Done], held: str) -> None:
    listed = [line.split() for line in here("locks", "list", "--output", "table").out.splitlines()]
    assert listed[0] == ["LOCK", "KIND", "SLOTS", "ENABLED", "HELD", "WAITING"]
    assert [held, "semaphore", "3", "yes", "2", "0"] in listed
    shown = [line.split() for line in here("locks", "show", held, "--output", "table").out.splitlines()]
    assert shown[:3] == [listed[0], [held, "semaphore", "3", "yes", "2", "0"], []]
    assert " ".join(shown[3]) == "HOLDER SLOT FENCING TOKEN HELD FOR REMAINING"
    assert [line[:2] for line in shown[4:]] == [["billing-1", "1"], ["billing-2\\x1b[2J", "2"]]
    assert shown[4][-1] in ("0s", "59s", "58s")


def test_an_operator_takes_it_from_some_or_from_all(here: Callable[..., Done], held: str) -> None:
    for flags in ([], ["--all", "--holder", "billing-1"]):
        refused = here("locks", "release", held, *flags)
        assert (refused.code, refused.out) == (2, "")
    (released,) = here("locks", "release", held, "--holder", "billing-1").rows
    assert (released["holder"], released["slot"]) == ("billing-1", 1)
    nobody = here("locks", "release", held, "--holder", "billing-1")
    assert nobody == (0, "", f"popgate: lock {held} was not held by that holder\n")
    kept = here("locks", "delete", held)
    assert (kept.code, "billing-2" in kept.err) == (2, True)
    assert "\x1b" not in kept.err
    (left,) = here("locks", "show", held).rows
    (holder,) = left["holders"]
    token = str(holder["fencing_token"])
    assert here("locks", "release", held, "--fencing-token", token).rows == [holder]
