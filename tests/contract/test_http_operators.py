"""What a proxy shows to its operators besides topics: the reports of the pipeline, and that there is a doctor."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.http_server import Json, answer, problem
from support.proxy import ProxyProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path_factory.mktemp("proxy"), "--report-folder", str(folder)) as process:
        yield process


def test_reports_are_shown_as_soon_as_they_are_written(proxy: ProxyProcess, folder: Path) -> None:
    listed = answer(proxy.client.get("/v1/admin/reports"))
    assert listed == {"configured": True, "reports": [], "trouble": None}
    (folder / "audit").mkdir()
    (folder / "audit/report.html").write_text("<!doctype html><p>CLEAN</p>")
    told: Json = {
        "verdict": "CLEAN",
        "text": "5 deliveries.",
        "faults": {},
        "not_certain": {},
        "journal_events_missing": 0,
    }
    (folder / "audit/verdict.json").write_text(json.dumps({**told, "end": "2026-11-27T10:00:00+00:00"}))
    (one,) = answer(proxy.client.get("/v1/admin/reports"))["reports"]
    assert (one["name"], one["bytes"], one["verdict"]["headline"]) == ("audit", 27, "CLEAN")
    page = proxy.client.get("/v1/admin/reports/audit")
    assert (page.status_code, page.text) == (200, "<!doctype html><p>CLEAN</p>")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert "sandbox" in policy, "a forged report can't use the console's origin"
    problem(proxy.client.get("/v1/admin/reports/nothing"), 404, "not_found")
    problem(proxy.client.get("/v1/admin/reports/..%2faudit"), 404, "not_found")
    problem(proxy.client.get("/v1/admin/reports/.hidden"), 400, "invalid_request")


def test_a_folder_that_is_gone_is_named(proxy: ProxyProcess, folder: Path) -> None:
    away = folder.rename(folder.with_name("elsewhere"))
    listed = answer(proxy.client.get("/v1/admin/reports"))
    away.rename(folder)
    assert listed["reports"] == []
    assert str(folder) in listed["trouble"]


def test_a_proxy_without_rabbitmq_has_nothing_to_examine(proxy: ProxyProcess) -> None:
    told = answer(proxy.client.get("/v1/admin/doctor"))
    assert (told["available"], told["running"], told["latest"]) == (False, False, None)
    assert "embedded store" in told["unavailable_because"]
    problem(proxy.client.post("/v1/admin/doctor"), 409, "conflict")
