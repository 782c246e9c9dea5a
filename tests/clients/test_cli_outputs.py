"""What every command prints when it succeeds, in each form of the output, and what an unknown name suggests.

Most commands run in this process, because the start of a process takes most of the time of a command.
"""

import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from popgate.cli.commands import run
from popgate_client import Client, OutgoingMessage
from support.command_line import CommandLine, Done
from support.processes import wait_until
from support.proxy import ProxyProcess, popgate_command

GROUP = "billing"


@pytest.fixture
def filled(client: Client, topic: str) -> str:
    """A topic with a group that has ready messages, and one dead letter."""
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP)
    bodies = ["first", "x" * 100]
    client.publish(topic, *(OutgoingMessage(body=body, headers={"n": 1}) for body in bodies), *"abc")
    (lease,) = client.pop(topic, GROUP, wait_seconds=5)
    lease.reject("no use")
    wait_until(lambda: client.stats(topic, GROUP)["dead"] == 1, timeout_seconds=10, what="the dead letter")
    return topic


CHANGES = [
    "topics create NEW --queues 1",
    "groups create NEW g",
    "groups policy NEW g --max-deliveries 3",
    "groups pause NEW g",
    "groups resume NEW g",
    "mode NEW g pull",
    "mode NEW g pop",
    "publish NEW body",
    "purge NEW g --yes",
    "dead-letters redrive NEW g",
    "dead-letters cancel NEW g",
    "dead-letters purge NEW g --yes",
    "lease-groups ack NEW g stream --through-epoch 1",
    "lease-groups release NEW g stream --after-epoch -1",
    "locks set NEW --kind mutex",
    "locks release NEW --all",
    "locks delete NEW",
    "groups delete NEW g --yes",
    "topics delete NEW --yes",
]
READS = [
    *("topics", "topics list", "groups list TOPIC", "groups policy TOPIC GROUP", "stats", "stats TOPIC", "cluster"),
    *("stats TOPIC GROUP", "cluster --show queues", "mode TOPIC GROUP", "mode TOPIC GROUP pull --dry-run"),
    *("lease-groups list TOPIC GROUP", "dead-letters list TOPIC GROUP", "locks", "locks list"),
    *("pop TOPIC GROUP", "pop TOPIC GROUP --ack", "tail TOPIC --group GROUP --max-messages 1"),
]


@pytest.fixture
def here(
    shared_proxy: ProxyProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run a command in this process, against the shared proxy."""
    monkeypatch.setenv("POPGATE_URL", shared_proxy.url)

    def run_here(*arguments: str) -> Done:
        try:
            code = run(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return run_here


def words(line: str, topic: str) -> list[str]:
    return line.replace("TOPIC", topic).replace("GROUP", GROUP).replace("NEW", f"{topic}-new").split()


def test_every_change_says_what_it_did_unless_it_is_to_be_quiet(here: Callable[..., Done], topic: str) -> None:
    for line in CHANGES:
        done = here(*words(line, topic))
        assert done.code == 0, (line, done.err)
        assert done.out or done.err, line
    for line in CHANGES:
        assert here(*words(line, topic), "-q") == (0, "", ""), line


@pytest.mark.parametrize("form", ["json", "table", "wide", "name"])
def test_every_read_prints_its_rows_or_that_there_are_none(here: Callable[..., Done], filled: str, form: str) -> None:
    for line in READS:
        done = here(*words(line, filled), "-o", form)
        assert done.code == 0, (line, done.err)
        assert done.out or done.err, line
        if form == "json":
            assert all(isinstance(row, dict) for row in done.rows), line


def test_a_name_is_what_other_commands_take(popgate: CommandLine, here: Callable[..., Done], filled: str) -> None:
    assert filled in here("topics", "-o", "name").out.splitlines()
    assert here("groups", "list", filled, "-o", "name").out == f"{GROUP}\n"
    assert here("stats", filled, "-o", "name").out == f"{filled} {GROUP}\n"
    acked = popgate.shell(f"popgate pop {filled} {GROUP} -o name | popgate ack {filled} {GROUP}")
    assert [row["status"] for row in acked.rows] == ["acked"]
    (letter,) = here("dead-letters", "list", filled, GROUP, "-o", "name").out.splitlines()
    assert here("dead-letters", "show", filled, GROUP, letter).rows[0]["body"] == "first"


def test_wide_shows_whole_cells_and_more_columns(here: Callable[..., Done], filled: str, client: Client) -> None:
    shown: dict[str, str] = {}
    for form in ("table", "wide"):
        shown[form] = here("pop", filled, GROUP, "-o", form).out
        client.release(filled, GROUP, [shown[form].split()[-1]], delay_seconds=0)
    assert "x" * 57 + "..." in shown["table"]
    assert "x" * 100 in shown["wide"]
    assert "HEADERS" in shown["wide"]
    assert '{"n":1}' in shown["wide"]


def test_quiet_settling_prints_only_what_was_not_settled(popgate: CommandLine, filled: str, client: Client) -> None:
    (lease,) = client.pop(filled, GROUP, wait_seconds=5)
    done = popgate("ack", filled, GROUP, lease.receipt_handle, "nonsense", "-q")
    assert (done.code, [row["status"] for row in done.rows]) == (1, ["invalid"])
    assert popgate("ack", filled, GROUP).err == "popgate: standard input contained no receipt handles\n"


def test_an_empty_list_says_so_on_standard_error(
    own_proxy: ProxyProcess, here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPGATE_URL", own_proxy.url)
    empty = {"topics": "no topics", "stats": "no subscriptions", "locks": "no locks", "cluster": "runs alone"}
    for command, said in empty.items():
        done = here(command)
        assert (done.code, done.out) == (0, "")
        assert said in done.err
        assert here(command, "-q") == (0, "", "")


# ---------------------------------------------------------------- help and suggestions


def test_help_is_shown_for_a_command_and_without_one(here: Callable[..., Done]) -> None:
    bare = here()
    assert (bare.code, bare.out) == (2, "")
    assert "Exit codes:" in bare.err
    assert here("help").out == bare.err
    assert here("help", "groups", "create") == here("groups", "create", "--help")
    assert here("groups").err == here("groups", "--help").out


@pytest.mark.parametrize(
    ("line", "suggested"),
    [
        ("topcis", "topics"),
        ("send", "publish"),
        ("topics crate", "create"),
        ("topics rm", "delete"),
        ("pop t --wiat 5", "--wait-seconds"),
        ("pop t --max_messages 5", "--max-messages"),
        ("topics --ulr x list", "--url"),
        ("topics -o jsno", "json"),
        ("mode t g pul", "pull"),
        ("serve --prot 1", "--port"),
    ],
)
def test_an_unknown_word_gets_a_suggestion(here: Callable[..., Done], line: str, suggested: str) -> None:
    done = here(*line.split())
    assert done.code == 2
    assert f"did you mean '{suggested}'?" in done.err


def test_an_unknown_name_gets_a_suggestion_from_the_server(
    popgate: CommandLine, here: Callable[..., Done], filled: str
) -> None:
    done = popgate("stats", filled[:-1], GROUP)
    assert (done.code, done.out) == (1, "")
    assert f"did you mean '{filled}'? Or create it with: popgate topics create {filled[:-1]} --queues" in done.err
    assert f"did you mean '{GROUP}'?" in here("groups", "policy", filled, "biling").err
    here("locks", "set", f"{filled}-nightly", "--kind", "mutex")
    assert f"did you mean '{filled}-nightly'?" in here("locks", "show", f"{filled}-nihgtly").err
    assert "did you mean" not in here("stats", "nothing-like-it", GROUP).err


# ---------------------------------------------------------------- colours


@pytest.mark.parametrize(("variables", "is_bold"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_a_header_is_bold_only_on_a_terminal_with_colours(
    popgate: CommandLine, filled: str, variables: dict[str, str], is_bold: bool
) -> None:
    environment = {**popgate.environment, "TERM": "xterm", "NO_COLOR": "", **variables}
    controller, terminal = pty.openpty()
    subprocess.run(popgate_command("stats", filled), stdout=terminal, env=environment, check=True)
    os.close(terminal)
    shown = os.read(controller, 10_000).decode()
    os.close(controller)
    assert shown.startswith("\x1b[1mTOPIC") is is_bold
    assert "\x1b" not in popgate("stats", filled, "-o", "table").out


# ---------------------------------------------------------------- files of keys and secrets


def test_the_commands_for_files_have_the_same_flags(here: Callable[..., Done], tmp_path: Path) -> None:
    file, secret = str(tmp_path / "keys.toml"), str(tmp_path / "secret")
    added = here("keys", "add", "app", "--role", "worker", "--file", file, "-q")
    assert (added.code, added.err, added.out[:3]) == (0, "", "pg_")
    (row,) = here("keys", "add", "app", "--file", file, "-o", "json").rows
    assert row["key"].startswith("pg_")
    assert len(here("keys", "list", "--file", file, "-o", "name").out.splitlines()) == 2
    assert here("keys", "revoke", row["id"], "--file", file, "-q") == (0, "", "")
    assert here("secrets", "new", secret, "-q") == (0, "", "")
    assert len(here("secrets", "list", secret, "-o", "name").out.splitlines()) == 1
