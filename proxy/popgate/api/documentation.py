"""Serves /docs, which shows /openapi.json in Swagger UI. All files of the page are in this package, so the browser
contacts no other server."""

from functools import cache
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from popgate.api.problems import NotFound

FOLDER = Path(__file__).parent / "static" / "docs"
MEDIA_TYPES = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "start.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}
# Swagger UI writes style attributes, and loads its icons from data: URLs.
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}


def add_documentation(app: FastAPI) -> None:
    """Serve the page /docs and the files that it loads. Only the files that ``MEDIA_TYPES`` lists are served."""

    async def page() -> Response:
        return Response(_content("index.html"), media_type="text/html; charset=utf-8", headers=_HEADERS)

    async def part(name: str) -> Response:
        if name not in MEDIA_TYPES:
            raise NotFound(f"/docs/{name}")
        headers = {**_HEADERS, "cache-control": "max-age=3600"}
        return Response(_content(name), media_type=MEDIA_TYPES[name], headers=headers)

    app.add_api_route("/docs", page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/docs/{name}", part, methods=["GET"], include_in_schema=False)


@cache
def _content(name: str) -> bytes:
    """Return a file. It is kept, so that a client that does not read its answer holds no descriptor."""
    return (FOLDER / name).read_bytes()
