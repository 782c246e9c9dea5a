"""A short soak with a fixed seed: the harness runs every kind of client, and nothing is refused."""

import json
from pathlib import Path

import pytest

from soak.run import main

SEED = 25
SECONDS = 10
USED = {"publish", "pop", "ack", "reject", "release", "extend", "assign", "pull", "commit", "lock"} | {
    "dead letters",
    "redrive",
    "admin",
    "look",
}


@pytest.mark.slow
def test_a_short_soak_uses_everything_and_is_refused_nothing(
    tmp_path: Path, amqp_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--seconds", str(SECONDS), "--interval", "1", "--seed", str(SEED), "--amqp-url", amqp_url]
    main([*arguments, "--out", str(tmp_path)])
    said = capsys.readouterr().out
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert set(figures["proxies"]) == {"embedded", "rabbitmq"}
    for name, proxy in figures["proxies"].items():
        assert proxy["complaints"] == {}, said
        assert set(proxy["requests"]) >= USED, name
        assert proxy["client_restarts"] > 0
        assert len(proxy["samples"]) >= 8
        flat = {one["name"] for one in proxy["findings"] if one["is_flat"]}
        assert {"descriptors", "threads"} <= flat, said  # memory and latency need longer
    assert (tmp_path / "soak.svg").read_text().startswith("<svg")
