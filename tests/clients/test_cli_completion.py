"""`popgate completion`: the scripts in the real shells."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from popgate.cli.commands import run
from popgate_client import Client
from support.command_line import CommandLine
from support.proxy import ProxyProcess

GROUP = "billing"
TIMEOUT_SECONDS = 20
PROGRAMS = Path(sys.executable).parent
CASES = [
    (["to"], {"top", "topics"}),
    (["topics", "cr"], {"create"}),
    (["pop", "ord"], {"orders", "ordinary"}),
    (["pop", "--max-messages", "3", "orders", ""], {GROUP}),
    (["groups", "policy", "orders", GROUP, "--retry-m"], {"--retry-max-seconds", "--retry-multiplier"}),
    (["mode", "orders", GROUP, "p"], {"pop", "pull"}),
    (["topics", "-o", ""], {"json", "table", "wide", "name"}),
    (["locks", "show", "night"], {"nightly"}),
    (["dead-letters", "redrive", "orders", GROUP, "--target-topic", "ordi"], {"ordinary"}),
    (["publish", "orders", "--wait"], set[str]()),
    (["secrets", "list", "sec"], {"secret-1", "secret-2"}),
]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("completion")) as proxy:
        with Client(proxy.url) as client:
            for topic in ("orders", "ordinary"):
                client.put_topic(topic, queues=1)
            client.put_group("orders", GROUP)
            client.put_lock("nightly", "mutex")
        yield proxy


@pytest.fixture
def environment(proxy: ProxyProcess, tmp_path: Path) -> dict[str, str]:
    """Variables with which a shell finds `popgate`, and a script for each shell in the working directory."""
    for shell in ("bash", "zsh", "fish"):
        done = CommandLine(proxy.url)("completion", shell)
        (tmp_path / f"popgate.{shell}").write_text(done.out)
    for number in (1, 2):
        (tmp_path / f"secret-{number}").touch()
    mine = CommandLine(proxy.url).environment
    return {**mine, "PATH": f"{PROGRAMS}:{mine['PATH']}", "HOME": str(tmp_path), "TERM": "dumb"}


def test_bash_completes_commands_flags_values_names_and_paths(environment: dict[str, str], tmp_path: Path) -> None:
    script = (
        'source popgate.bash; f() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _popgate; echo "${COMPREPLY[@]}"; }\n'
    )
    script += "complete -p popgate >&2\n"
    script += "".join(f"f popgate {shlex.join(words)}\n" for words, _ in CASES)
    script += "f popgate topics --output = j\n"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "_popgate" in done.stderr
    *lines, with_equals = done.stdout.splitlines()
    for (words, wanted), line in zip(CASES, lines, strict=True):
        assert set(line.split()) == wanted, words
    assert with_equals == "json"


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_the_same(environment: dict[str, str], tmp_path: Path) -> None:
    for words, wanted in CASES:
        program = f"source popgate.fish; complete -C {shlex.quote('popgate ' + ' '.join(words))}"
        done = subprocess.run(
            ["fish", "--no-config", "-c", program],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert {line.partition("\t")[0] for line in done.stdout.splitlines()} == wanted, words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_at_a_tab(environment: dict[str, str], tmp_path: Path) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
    try:
        os.write(terminal, b"autoload -U compinit; compinit -u -D; source popgate.zsh; echo rea''dy\n")
        shown_until(terminal, "ready")
        for typed, wanted in (
            ("topi", "topics "),
            ("pop ordi", "pop ordinary "),
            ("pop orders --wa", "--wait-seconds "),
        ):
            os.write(terminal, f"popgate {typed}\t".encode())
            shown_until(terminal, wanted)
            os.write(terminal, b"\x15")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def shown_until(terminal: int, wanted: str) -> None:
    shown = ""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65_536).decode(errors="replace")


def test_a_proxy_that_is_away_leaves_the_rest_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_alarm(seconds: int) -> int:
        return 0

    monkeypatch.setattr("popgate.cli.completion.signal.alarm", no_alarm)  # it would end this process
    monkeypatch.setenv("POPGATE_URL", "http://127.0.0.1:1")
    assert run(["__complete", "--", "pop", ""]) == 0
    assert capsys.readouterr() == ("", "")
    run(["__complete", "--", "pop", "t", "--ac"])
    assert capsys.readouterr().out.startswith("--ack\t")
    run(["__complete", "--", "pop", "t", "--", "--ac"])
    assert capsys.readouterr().out == ""
    run(["__complete", "--", "locks", "acquire", "x", "--exec", "ls", "--ac"])
    assert capsys.readouterr().out == ":file\n"
    run(["__complete", "--", "topics", "--output=ta"])
    assert capsys.readouterr().out == "--output=table\n"
