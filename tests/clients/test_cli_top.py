"""`popgate top`: live on a real terminal, which is always restored, and printed elsewhere."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from popgate.cli.screen import ENTER, HOME, LEAVE
from popgate.cli.top_figures import OTHERS, Reading, rows_of
from popgate_client import Client
from support.command_line import CommandLine, ended
from support.proxy import ProxyProcess, popgate_command

GROUP = "default"
TIMEOUT_SECONDS = 20
DISPLAYS_SEARCHED = 8
"""Number of the last displays that are searched, because a rate is shown only for one interval."""


class LiveTop:
    """`popgate top` on a terminal of the given size."""

    def __init__(self, environment: dict[str, str], *arguments: str, columns: int = 120, lines: int = 30) -> None:
        self._controller, terminal = pty.openpty()
        self.columns = columns
        self.resize(columns, lines)
        self.modes_before: list[Any] = termios.tcgetattr(terminal)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *popgate_command("top", *arguments)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**environment, "TERM": "xterm"},
        )
        self.terminal = terminal
        self.shown = ""

    def resize(self, columns: int, lines: int) -> None:
        self.columns = columns
        fcntl.ioctl(self._controller, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def wait_for(self, is_shown: Callable[[list[str]], bool]) -> list[str]:
        """Return the lines of the first display that fits. The display before the last one is complete."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            self.read(0.2)
            for display in self.shown.split(HOME)[1:-1][-DISPLAYS_SEARCHED:]:
                lines = [line.removesuffix("\x1b[K") for line in display.removesuffix("\x1b[J").split("\r\n")]
                if is_shown(lines):
                    return lines
        raise AssertionError(f"not shown: {self.shown[-2000:]!r}")

    def end(self) -> int:
        """Return the exit code. Check that the terminal is as it was."""
        code = self.process.wait(TIMEOUT_SECONDS)
        self.read(0.1)
        assert termios.tcgetattr(self.terminal) == self.modes_before
        assert self.shown.count(ENTER) == self.shown.count(LEAVE)
        assert self.shown.rindex(LEAVE) > self.shown.rindex(HOME)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)
        os.close(self._controller)

    def read(self, seconds: float) -> None:
        """Collect what is shown, until nothing comes any more. The first part may take this many seconds."""
        while select.select([self._controller], [], [], seconds)[0]:
            with suppress(OSError):
                self.shown += os.read(self._controller, 65_536).decode()
            seconds = 0


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("top")) as proxy:
        with Client(proxy.url) as client:
            for topic, count in (("few", 1), ("many", 5)):
                client.put_topic(topic, queues=1)
                client.put_group(topic, GROUP)
                client.publish(topic, *["body"] * count)
            (lease,) = client.pop("few", GROUP, wait_seconds=5)
            lease.reject()
        yield proxy


@pytest.fixture
def live(proxy: ProxyProcess) -> Iterator[Callable[..., LiveTop]]:
    started: list[LiveTop] = []

    def start(*arguments: str, **size: int) -> LiveTop:
        environment = {**CommandLine(proxy.url).environment}
        started.append(LiveTop(environment, "--interval-seconds", "0.2", *arguments, **size))
        return started[-1]

    yield start
    for one in started:
        one.close()


def column(lines: list[str], title: str, topic: str) -> str:
    """Return a cell of the table on the screen; the titles have no spaces in their last word."""
    words = lines[1].replace("IN FLIGHT", "IN_FLIGHT").split()
    row = next(line for line in lines[2:] if line.startswith(topic))
    return row.split()[words.index(title)]


def test_it_shows_figures_and_rates_until_q(live: Callable[..., LiveTop], proxy: ProxyProcess) -> None:
    top = live()
    lines = top.wait_for(lambda lines: lines[2].startswith("many") and lines[3].startswith("few"))
    assert lines[0].startswith(f"popgate top  {proxy.url}  2 subscriptions, by ready")
    assert (column(lines, "READY", "many"), column(lines, "DEAD", "few")) == ("5", "1")
    top.press("d")
    lines = top.wait_for(lambda lines: "by dead" in lines[0])
    assert lines[2].startswith("few")
    with Client(proxy.url) as client:
        for body in "abcdefgh":
            client.publish("many", body)
            client.ack("many", GROUP, client.pop("many", GROUP, wait_seconds=5))
            top.read(0)
    rates = top.wait_for(lambda lines: column(lines, "OUT/S", "many") not in ("-", "0.0"))
    assert column(rates, "IN/S", "many") not in ("-", "0.0")
    top.press("q")
    assert top.end() == 0


@pytest.mark.parametrize(
    ("number", "code"), [(None, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)], ids=["ctrl-c", "sigterm", "sighup"]
)
def test_a_signal_ends_it_and_the_terminal_is_restored(
    live: Callable[..., LiveTop], number: signal.Signals | None, code: int
) -> None:
    top = live()
    top.wait_for(lambda lines: lines[2].startswith("many"))
    if number is None:
        top.press("\x03")
    else:
        top.process.send_signal(number)
    assert top.end() == code
    assert "Traceback" not in top.shown


def test_a_narrow_terminal_shows_the_first_columns_and_a_resize_more(live: Callable[..., LiveTop]) -> None:
    top = live(columns=40, lines=8)
    lines = top.wait_for(lambda lines: lines[2].startswith("many"))
    assert len(lines) <= 8
    assert [line for line in lines if len(line) > 40] == []
    assert column(lines, "READY", "many").isdigit()
    assert "MODE" not in lines[1]
    top.resize(120, 30)
    top.wait_for(lambda lines: "MODE" in lines[1])
    top.press("q")
    assert top.end() == 0


def test_a_suspended_display_leaves_the_terminal_and_comes_back(live: Callable[..., LiveTop]) -> None:
    top = live()
    top.wait_for(lambda lines: lines[2].startswith("many"))
    top.process.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while LEAVE not in top.shown and time.monotonic() < deadline:
        top.read(0.1)
    assert termios.tcgetattr(top.terminal) == top.modes_before
    top.process.send_signal(signal.SIGCONT)
    top.wait_for(lambda lines: top.shown.count(ENTER) == 2 and lines[2].startswith("many"))
    top.press("q")
    assert top.end() == 0


def test_a_proxy_that_hangs_is_reported_and_q_still_ends_the_display(
    live: Callable[..., LiveTop], proxy: ProxyProcess
) -> None:
    top = live()
    top.wait_for(lambda lines: "q=quit" in lines[-1])
    proxy.pause()
    try:
        lines = top.wait_for(lambda lines: "no answer from" in lines[-1])
        assert column(lines, "READY", "many") == "5"
        top.press("q")
        assert top.end() == 0
    finally:
        proxy.resume()


def test_rates_of_groups_that_share_a_row_are_unknown() -> None:
    state = {"mode": "pop", "ready": 1, "blocked": 0, "in_flight": 0, "delayed": 0, "dead": 0}
    own, shared = ("t", "own"), ("t", "shared")
    readings = [
        Reading(
            at,
            {own: state, shared: state},
            {(own, "acked"): 2.0 * at, ((OTHERS, OTHERS), "acked"): 9.0, ((OTHERS, ""), "published"): 5.0},
            {own: 1.0},
        )
        for at in (1.0, 2.0)
    ]
    figures = [(row["in_per_second"], row["out_per_second"], row["pollers"]) for row in rows_of(*readings)]
    assert figures == [(None, 2.0, 1), (None, None, None)]


def test_elsewhere_it_prints_once(proxy: ProxyProcess) -> None:
    popgate = CommandLine(proxy.url)
    done = popgate("top", "--sort", "name", "--count", "1", "--interval-seconds", "0.1")
    assert [row["topic"] for row in done.rows] == ["few", "many"]
    assert {"ready", "in_flight", "dead", "oldest_age_seconds", "in_per_second", "out_per_second", "pollers"} <= (
        done.rows[0].keys()
    )
    assert popgate("top", "none").code == 1
    assert "does not exist" in popgate("top", "many", "nobody").err


def test_elsewhere_it_repeats_at_the_interval(proxy: ProxyProcess) -> None:
    popgate = CommandLine(proxy.url)
    with popgate.running("top", "many", "--interval-seconds", "0.2") as process, Client(proxy.url) as client:
        assert process.stdout is not None
        assert b'"many"' in process.stdout.readline()
        client.publish("many", *"abc")
        rates = [process.stdout.readline().partition(b'"in_per_second":')[2][:3] for _ in range(4)]
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert any(rate not in (b"0.0", b"nul") for rate in rates)
    assert (done.code, done.err) == (130, "")
