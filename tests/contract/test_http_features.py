"""A server with disabled features: to clients it looks like one that never had them."""

from collections.abc import Iterator
from http import HTTPStatus

import httpx
import pytest

from popgate.api.features import FIELDS, PATHS
from popgate.domain.features import ALL_FEATURES, Feature
from support.proxy import ProxyProcess

GROUP = "/v1/topics/t/groups/default"
ADMIN_GROUP = "/v1/admin/topics/t/groups/default"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a proxy that offers pull mode and little else."""
    with ProxyProcess(tmp_path_factory.mktemp("old"), "--features", "pull,purge") as proxy:
        yield proxy.client


def test_it_tells_no_more_than_it_offers(old: httpx.Client) -> None:
    assert old.get("/v1").json()["features"] == ["pull", "purge", "auto_create"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", f"{GROUP}/pop"),
        ("POST", f"{GROUP}/ack"),
        ("POST", f"{GROUP}/extend"),
        ("GET", f"{GROUP}/lease-groups"),
        ("GET", "/v1/locks"),
        ("PUT", "/v1/locks/a"),
        ("GET", f"{ADMIN_GROUP}/consume-mode"),
        ("GET", f"{ADMIN_GROUP}/dead-letters"),
        ("POST", f"{ADMIN_GROUP}/pause"),
    ],
)
def test_what_it_does_not_offer_is_answered_as_an_unknown_path_is(old: httpx.Client, method: str, path: str) -> None:
    answer, unknown = old.request(method, path), old.post(f"{GROUP}/nothing")
    assert (answer.status_code, answer.json()["code"]) == (HTTPStatus.NOT_FOUND, "not_found")
    assert answer.json() == {**unknown.json(), "detail": unknown.json()["detail"].replace(f"{GROUP}/nothing", path)}
    assert answer.headers["content-type"] == unknown.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/topics/t/messages", {"messages": [{"body": "a"}, {"body": "b", "ordering_key": "k"}]}, "ordering_key"),
        ("/v1/topics/t/messages", {"messages": [{"body": "a"}, {"body": "b", "dedup_id": "k"}]}, "dedup_id"),
    ],
)
def test_a_field_that_it_does_not_offer_is_an_unknown_one(
    old: httpx.Client, path: str, body: dict[str, object], field: str
) -> None:
    problem = old.post(path, json=body).json()
    assert (problem["code"], problem["field"]) == ("invalid_request", f"messages[1].{field}")
    answer = old.put(ADMIN_GROUP, json={"retry": {"initial_seconds": 1}})
    assert (answer.status_code, answer.json()["field"]) == (HTTPStatus.BAD_REQUEST, "retry")


def test_what_it_offers_works_and_another_format_is_not_read(old: httpx.Client) -> None:
    published = old.post("/v1/topics/t/messages", json={"messages": [{"body": "a"}]})
    assert published.json()["results"][0]["status"] == "published"
    assert old.get(GROUP).json()["mode"] == "pull", "its groups can't be consumed otherwise"
    assert old.post(f"{ADMIN_GROUP}/purge").json()["purged"] == 1
    packed = {"content-type": "application/msgpack"}
    assert old.post("/v1/topics/t/messages", content=b"\x80", headers=packed).status_code == 415
    accepted = old.get(GROUP, headers={"accept": "application/msgpack"})
    assert accepted.headers["content-type"] == "application/json"


def test_a_body_that_is_nested_too_deeply_is_refused(old: httpx.Client) -> None:
    refused = old.post("/v1/topics/t/messages", content=b"[" * 100_000)
    assert (refused.status_code, refused.json()["code"]) == (HTTPStatus.BAD_REQUEST, "invalid_request")


def test_every_feature_is_known_by_a_path_or_a_field() -> None:
    assert set(PATHS) | set(FIELDS) | {Feature.MSGPACK} == set(ALL_FEATURES)
