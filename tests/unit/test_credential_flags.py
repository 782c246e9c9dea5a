"""Credentials in the command line of a process: which flags are hidden from ``ps``."""
# pyright: reportPrivateUsage=false
# The tests of texts call the functions through which the pipeline writes them.

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from popgate.auth.keys import new_key
from popgate.cli.credential_flags import without_values
from popgate.config.options import SETTINGS
from popgate_spark import credential_flags as pipeline
from popgate_spark import running
from support.processes import wait_until

KEY = new_key().text


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["serve", "--secret", "hunter2", "--port", "1"], ["serve", "--secret", "***", "--port", "1"]),
        (["serve", "--secret=hunter2=", "--port=1"], ["serve", "--secret=***", "--port=1"]),
        (["serve", "--amqp-url", "--secret", "hunter2"], ["serve", "--amqp-url", "***", "hunter2"]),
        (["serve", "--secret"], ["serve", "--secret"]),
        (["replicas", "plan", "--groups-url", "http://u:p@a"], ["replicas", "plan", "--groups-url", "***"]),
        (["pop", "orders", "--url", "http://u:p@a"], ["pop", "orders", "--url", "***"]),
        (["prove", "locks", "--http-url=http://u:p@a"], ["prove", "locks", "--http-url=***"]),
        (
            ["serve", "--secret-file", "f", "--amqp-url-file", "g"],
            ["serve", "--secret-file", "f", "--amqp-url-file", "g"],
        ),
        (["keys", "revoke", KEY, "--file", "k"], ["keys", "revoke", "pg_...", "--file", "k"]),
        (["stats", f"--url-typo=http://{KEY}"], ["stats", "--url-typo=http://pg_..."]),
        ([], []),
    ],
)
def test_only_values_that_may_be_credentials_are_hidden(words: list[str], shown: list[str]) -> None:
    assert without_values(words) == shown


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS if setting.hidden])
def test_every_hidden_setting_is_hidden_as_a_flag(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    assert without_values([flag, "hunter2"]) == [flag, "***"]


def test_an_error_of_the_pipeline_shows_no_credential_of_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    running._failed("the journal can't be opened: hdfs://user:secret@host/j: hdfs://user:secret@host/j/x is missing")
    assert capsys.readouterr().err == (
        "popgate-pipeline: the journal can't be opened: hdfs://host/j: hdfs://host/j/x is missing\n"
    )


def test_the_pipeline_names_its_report_without_the_credential_of_its_url(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(spark: Any, place: str, text: str) -> None: ...

    monkeypatch.setattr(running, "write_text", write_text)
    running._told(cast("Any", None), "hdfs://user:secret@host/out", "<html>", "done")
    assert capsys.readouterr().out == "done\n  report: hdfs://host/out/report.html\n"


@pytest.mark.parametrize("package", ["popgate.cli", "popgate_spark"])
def test_credentials_are_hidden_beside_words_that_are_not_utf_8(package: str) -> None:
    program = (
        f"from pathlib import Path; from {package}.credential_flags import hide_credentials\n"
        "hide_credentials(); print(Path('/proc/self/cmdline').read_bytes())"
    )
    words = ["--data-dir", os.fsdecode(b"/srv/\xff"), "--url", "http://user:hunter2@host"]
    shown = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True).stdout
    assert "--data-dir /srv/\\xef\\xbf\\xbd --url ***" in shown
    assert "hunter2" not in shown


def test_a_process_and_its_forks_show_no_credential_and_still_use_it() -> None:
    program = (
        "import os, sys; from pathlib import Path; from popgate.cli.credential_flags import hide_credentials\n"
        "hide_credentials()\n"
        "if os.fork(): os.wait()\n"
        "print(Path('/proc/self/cmdline').read_bytes(), sys.argv[2], flush=True)"
    )
    command = [sys.executable, "-c", program, "--secret", "hunter2" * 9, "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        shown, _, used = line.rpartition(" ")
        assert "popgate --secret *** --port 1" in shown
        assert "hunter2" not in shown
        assert used == "hunter2" * 9
    assert len(done.stdout.splitlines()) == 2


def test_the_pipeline_hides_the_same_words() -> None:
    words = ["advice", "--url", "--apply", "--journal=s3://k:s@b", "--topic", "t", "--state", "s", "--out"]
    shown = ["advice", "--url", "***", "--journal=***", "--topic", "t", "--state", "***", "--out"]
    assert pipeline.without_values(words) == shown


def test_the_pipeline_hides_its_credentials(tmp_path: Path) -> None:
    """Without Java, the process ends after its imports, which take longer than a look at it."""
    words = ["advice", "--apply", "--url", "http://user:hunter2@127.0.0.1:1", "--journal=s3a://key:hunter2@bucket/j"]
    words += ["--out", "s3a://key:hunter2@bucket/out"]
    program = Path(sys.executable).with_name("popgate-pipeline")
    environment = {**os.environ, "PATH": str(tmp_path), "JAVA_HOME": str(tmp_path)}
    with subprocess.Popen([program, *words], env=environment, stderr=subprocess.PIPE, text=True) as process:
        shown: list[bytes] = []

        def is_hidden() -> bool:
            shown.append(Path(f"/proc/{process.pid}/cmdline").read_bytes())
            return b"***" in shown[-1] or process.poll() is not None

        wait_until(is_hidden, timeout_seconds=20, what="the credentials to be hidden")
        said = process.communicate(timeout=60)[1]
    assert b"popgate-pipeline advice --apply --url *** --journal=*** --out ***" in shown[-1]
    assert b"hunter2" not in shown[-1]
    assert (process.returncode, "Java" in said, "hunter2" in said) == (2, True, False)


def test_popgate_hides_its_flags_before_it_does_anything_else(tmp_path: Path) -> None:
    """A configuration file that is a pipe keeps the process at its start."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "popgate.cli", "serve", "--secret", "hunter2", "--config", str(pipe)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with pipe.open("w") as stream:  # returns when the process reads
            shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            stream.write("port = 0\n")
    finally:
        assert process.wait(20) == 2
    assert b"popgate serve --secret *** --config" in shown
    assert b"hunter2" not in shown
