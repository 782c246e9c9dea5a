"""Serves /console, a page for operators. All of its files are in this package, so the browser contacts no other server.

The files contain no data, and are served without a credential. The page asks for a key, and sends it with each of its
requests to the rest of the interface. The content security policy permits only scripts and styles from these files.
"""

import gzip
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request
from starlette.responses import Response

from popgate.api.problems import NotFound

FOLDER = Path(__file__).parent / "static" / "console"
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # the browser asks each time, so the files of two versions never run together
    "vary": "accept-encoding",
}


class _File(NamedTuple):
    """A file as it is served: plain and compressed, with the tag that identifies its content."""

    plain: bytes
    compressed: bytes
    tag: str


def add_console(app: FastAPI) -> None:
    """Serve the page /console and its files. Only files with an extension in ``MEDIA_TYPES`` are served."""

    async def page(request: Request) -> Response:
        return _answer(PAGE, request)

    async def part(name: str, request: Request) -> Response:
        if name == PAGE or name not in _names():
            raise NotFound(f"/console/{name}")
        return _answer(name, request)

    async def page_with_slash() -> Response:
        return Response(
            status_code=308, headers={**_HEADERS, "location": "../console"}
        )  # the page's links are relative

    app.add_api_route("/console", page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/console/", page_with_slash, methods=["GET"], include_in_schema=False)
    app.add_api_route("/console/{name}", part, methods=["GET"], include_in_schema=False)


def _answer(name: str, request: Request) -> Response:
    file = _file(name)
    headers = {**_HEADERS, "etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    content = file.plain
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        content = file.compressed
    return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)


@cache
def _names() -> frozenset[str]:
    return frozenset(file.name for file in FOLDER.iterdir() if file.suffix in MEDIA_TYPES)


@cache
def _file(name: str) -> _File:
    """Return a file. It is kept, so that a client that does not read its answer holds no descriptor."""
    plain = (FOLDER / name).read_bytes()
    return _File(plain, gzip.compress(plain, mtime=0), f'"{sha256(plain).hexdigest()[:16]}"')
