"""The description of the HTTP interface: a route that its author forgot to describe does not take it away."""

from typing import Any

from popgate.api.openapi import complete


def described(path: str, operation: dict[str, Any]) -> dict[str, Any]:
    whole = complete({"paths": {path: {"post": {"responses": {}, **operation}}}})
    found: dict[str, Any] = whole["paths"][path]["post"]
    return found


def test_a_request_without_an_example_is_described_all_the_same() -> None:
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/NewRequest"}}}}
    operation = described("/v1/admin/new", {"summary": "New", "description": "Do it. More.", "requestBody": body})
    assert (operation["summary"], operation["description"]) == ("Do it", "More.")
    assert "example" not in operation["requestBody"]["content"]["application/json"]


def test_a_request_whose_body_has_no_schema_of_a_name_or_is_not_json_is_described_all_the_same() -> None:
    plain = {"content": {"application/json": {"schema": {"type": "object"}}}}
    other = {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
    for body in (plain, other):
        assert described("/v1/admin/new", {"summary": "New", "requestBody": body})["summary"] == "New"
