"""The prover's parts, without processes: frames, records, reports, commands and options."""

import json
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest

from popgate.cli.commands import run
from popgate.domain.errors import StartupError
from popgate.domain.lock_history import check
from popgate.domain.lock_operations import KILLED, Action, Disturbance, Operation, OperationOutcome
from popgate.domain.locks import LockKind
from popgate.prover.errors import ProverFailed
from popgate.prover.fork_server import ForkServer
from popgate.prover.nodes import CommandNodes
from popgate.prover.record import Record
from popgate.prover.relay import CHANNEL_OPEN, HEARTBEAT_FRAME, METHOD_FRAME, Frames
from popgate.prover.report import Cost, KindReport, Report, Verdict, as_json, lines
from popgate.prover.run import ProveOptions, broker_url, client_urls
from popgate.prover.target import BUILT_IN, load


def frame(kind: int, payload: bytes) -> bytes:
    return bytes([kind, 0, 1]) + len(payload).to_bytes(4, "big") + payload + b"\xce"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_frames_are_cut_wherever_the_bytes_are(step: int) -> None:
    seen: list[tuple[int, bytes]] = []
    data = b"AMQP\x00\x00\x09\x01" + frame(METHOD_FRAME, CHANNEL_OPEN + b"\x00") + frame(HEARTBEAT_FRAME, b"")
    frames = Frames(lambda kind, method: seen.append((kind, method)), after_header=True)
    for at in range(0, len(data), step):
        frames.feed(data[at : at + step])
    assert seen == [(METHOD_FRAME, CHANNEL_OPEN), (HEARTBEAT_FRAME, b"")]


def test_the_url_gets_a_heartbeat_unless_it_has_one() -> None:
    assert broker_url("amqp://u:p@h:1/v") == "amqp://u:p@h:1/v?heartbeat=2"
    assert broker_url("amqp://h?heartbeat=7") == "amqp://h/?heartbeat=7"


def test_clients_over_http_begin_with_another_proxy_each() -> None:
    urls = ["http://h:1", "http://h:2"]
    assert client_urls(urls, over_http=True) == ["http://h:1,http://h:2", "http://h:2,http://h:1"]
    assert client_urls(["amqp://h:1/"], over_http=False) == ["amqp://h:1/?heartbeat=2"]


def test_the_options_of_a_proof_are_shown_without_its_urls() -> None:
    options = ProveOptions(
        implementation=BUILT_IN,
        urls=["amqp://u:hunter2@h/"],
        kinds=[LockKind.MUTEX],
        seed=1,
        duration_seconds=1.0,
        slots=1,
        workers=1,
        faults=frozenset(),
    )
    assert "hunter2" not in repr(options)


@pytest.mark.parametrize(
    "url",
    ["https://h/", "amqp://h/", "http://", "http://h:port/", "h", "http://h:1,http://h:2", "http://u:hunter2@h:1"],
)
def test_what_is_no_url_of_a_proxy_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="--http-url") as raised:
        client_urls([url], over_http=True)
    assert "hunter2" not in raised.value.detail


@pytest.mark.parametrize("url", ["amqps://h/", "http://h/", "amqp://", "amqp://h:port/", "h"])
def test_what_is_no_url_of_a_broker_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="--amqp-url"):
        broker_url(url)


def test_an_implementation_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(load(BUILT_IN))
    (tmp_path / "locks_of_my_own.py").write_text("def connect(): ...\nnothing = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert callable(load("locks_of_my_own:connect"))
    for wrong in (
        "locks_of_my_own",
        "locks_of_my_own:",
        ":connect",
        "locks_of_my_own:nothing",
        "nowhere.at.all:connect",
    ):
        with pytest.raises(StartupError, match="--implementation"):
            load(wrong)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--implementation", "nowhere:connect"], "--implementation: nowhere can't be imported"),
        (["--amqp-url", "amqps://127.0.0.1/"], "--amqp-url: must be amqp://"),
        (["--amqp-url", "amqp://127.0.0.1:1/,amqps://127.0.0.1/"], "--amqp-url: must be amqp://"),
        (["--http-url", "http://127.0.0.1:1"], "--amqp-url and --http-url exclude each other"),
        (["--fault", "node"], "--fault node needs --node-stop and --node-start"),
        (["--node-stop", "true"], "--node-stop and --node-start go together"),
    ],
)
def test_what_is_asked_wrongly_is_told_in_a_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prove", "locks", "--amqp-url", "amqp://127.0.0.1:1/", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"popgate: {says}")


def test_a_token_that_is_sent_without_encryption_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPGATE_TOKEN", "pg_a_b")
    wrong = ["--http-url", "http://prover.invalid:1/", "--http-url", "http://127.0.0.1:1/", "--fault", "node"]
    assert run(["prove", "locks", *wrong]) == 2
    assert [getattr(record, "host", None) for record in caplog.records] == ["prover.invalid"]


def test_without_a_broker_it_says_how_to_name_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POPGATE_AMQP_URL", raising=False)
    assert run(["prove", "locks"]) == 2
    told = capsys.readouterr().err
    assert "--amqp-url" in told
    assert "--http-url" in told


async def test_nodes_are_killed_by_the_users_commands(tmp_path: Path) -> None:
    nodes = CommandNodes(3, f"echo {{node}} >> {tmp_path}/stopped", "echo it is broken; exit 7")
    await nodes.kill(0)
    await nodes.kill(2)
    assert (tmp_path / "stopped").read_text() == "1\n3\n"
    with pytest.raises(ProverFailed, match="ended with 7: it is broken"):
        await nodes.start(1)


# ---------------------------------------------------------------- records


def line(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": number, "client": "w1", **fields}


def test_a_record_knows_who_holds_and_what_had_no_answer() -> None:
    record = Record()
    record.begun("w1", line(1, action="acquire", at=1.0, wait_seconds=2.0))
    record.ended("w1", line(1, at=1.5, outcome="done", slot=1, token=7))
    assert record.holders == {"w1"}
    record.begun("w1", line(2, action="verify", at=2.0, slot=1, token=7))
    record.disturb("w1", KILLED, 2.1, 2.2)
    assert not record.holders
    acquire, verify = record.operations()
    assert (acquire.slot, acquire.token, acquire.wait_seconds, acquire.completed) == (1, 7, 2.0, 1.5)
    assert (verify.outcome, verify.completed) == (OperationOutcome.UNKNOWN, inf)
    assert record.faults == {KILLED: 1}
    assert record.outcomes() == {"acquire": {"done": 1}, "verify": {"unknown": 1}}


def test_the_resource_refuses_whoever_comes_with_a_lower_token_of_that_slot() -> None:
    record = Record()
    writes = [(1, 7), (1, 9), (1, 7), (1, 9), (2, 3)]
    assert [record.admit({"slot": slot, "token": token}) for slot, token in writes] == [True, True, False, True, True]


def test_errors_that_say_the_same_are_counted_together() -> None:
    record = Record()
    for number, port in ((1, 40001), (2, 40002)):
        record.begun("w1", line(number, action="acquire", at=1.0))
        record.ended("w1", line(number, at=1.5, outcome="unknown", error=f"closed: h:{port} at 0xab{number}"))
    assert record.errors == {"closed: h:... at ...": 2}


# ---------------------------------------------------------------- reports


def kind_report(*operations: Operation, disturbances: list[Disturbance] | None = None) -> KindReport:
    counted = {str(Action.ACQUIRE): {str(OperationOutcome.DONE): len(operations)}}
    violations = check(operations, disturbances or [], slots=1)
    return KindReport(kind=LockKind.MUTEX, slots=1, started=100.0, rounds=1, operations=counted, violations=violations)


def grant(client: str, invoked: float, token: int | None) -> Operation:
    return Operation(
        client=client,
        action=Action.ACQUIRE,
        outcome=OperationOutcome.DONE,
        invoked=invoked,
        completed=invoked + 0.5,
        slot=1,
        token=token,
    )


def test_a_report_shows_each_broken_rule_once_with_its_times() -> None:
    report = Report(implementation="m:f", seed=3, kinds=[kind_report(grant("a", 101, 7), grant("b", 102, 7))])
    text = "\n".join(lines(report))
    assert report.verdict is Verdict.VIOLATIONS
    assert "VIOLATION of tokens: token 7 of slot 1 was given twice" in text
    assert "    1.000..  1.500 s a: acquire done (slot 1, token 7, willing to wait 0 s)" in text
    assert text.endswith("violations (m:f, --seed 3)")
    (kind,) = json.loads(json.dumps(as_json(report)))["kinds"]
    assert kind["violation_counts"] == {"tokens": 1, "exclusion": 1}
    assert kind["violations"][0]["excerpt"][0]["invoked"] == 1.0


def test_a_run_in_which_nobody_got_the_lock_proves_nothing() -> None:
    assert Report(implementation="m:f", seed=3).verdict is Verdict.NOTHING
    passed, empty = kind_report(grant("a", 101, 7)), kind_report()
    assert Report(implementation="m:f", seed=3, kinds=[passed]).verdict is Verdict.PASS
    assert Report(implementation="m:f", seed=3, kinds=[passed, empty]).verdict is Verdict.NOTHING


def test_costs_are_medians() -> None:
    cost = Cost.of([(0.001, 1, 0), (0.002, 1, 0), (0.009, 3, 1)])
    assert (cost.milliseconds, cost.milliseconds_max, cost.round_trips, cost.channels) == (2.0, 9.0, 1, 0)


def test_the_prover_imports_nothing_from_the_current_folder_for_its_own_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    load(BUILT_IN)
    assert str(tmp_path) not in sys.path


async def test_the_fork_server_starts_without_files_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uuid.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    async with ForkServer() as server:
        child = await server.fork(2)
        await child.kill()
    assert not (tmp_path / "imported").exists()
