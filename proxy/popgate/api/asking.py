"""Asks other proxies for their parts of the answer to a client's request.

The request is forwarded with its id, but without its other headers. A proxy that answers a forwarded request answers
only for itself.
"""

import asyncio
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from popgate.api.forwarding import forwarded_request
from popgate.api.request_ids import id_headers
from popgate.domain.errors import PeerUnavailable
from popgate.domain.names import InstanceId
from popgate.ports.peers import Peers

ASKED_SECONDS = 3.0
"""Maximum seconds to wait for another proxy. After that, the proxy counts as unreachable."""
_OK, _NOT_FOUND = 200, 404

AnswerT = TypeVar("AnswerT")


class Asked(NamedTuple, Generic[AnswerT]):
    """The answers of other proxies, and why the others did not answer."""

    answers: Sequence[tuple[InstanceId, AnswerT]]
    failures: Sequence[tuple[InstanceId, str]]


async def ask_all(peers: Peers, members: Sequence[InstanceId], request: Request, form: type[AnswerT]) -> Asked[AnswerT]:
    """Forward ``request`` to each of ``members``, and return their answers, which have the type ``form``."""
    reader: TypeAdapter[AnswerT] = TypeAdapter(form)
    asked = await asyncio.gather(*(_ask(peers, member, request) for member in members))
    answers: list[tuple[InstanceId, AnswerT]] = []
    failures: list[tuple[InstanceId, str]] = []
    for member, (body, failure) in zip(members, asked, strict=True):
        if body is None:
            failures.append((member, failure))
            continue
        try:
            answers.append((member, reader.validate_json(body)))
        except ValidationError:
            failures.append((member, "its release of popgate answers in another form"))
    return Asked(answers, failures)


async def _ask(peers: Peers, member: InstanceId, request: Request) -> tuple[bytes | None, str]:
    """Return the body of another proxy's answer, or None and the reason why there is none."""
    asked = forwarded_request(request.scope, b"", id_headers(request.scope["headers"]))
    try:
        async with asyncio.timeout(ASKED_SECONDS):
            answer = await peers.forward(member, asked, wait_seconds=0.0)
    except PeerUnavailable as error:
        return None, error.detail
    except TimeoutError:
        return None, f"it has not answered within {ASKED_SECONDS:g} seconds"
    if answer.status == _NOT_FOUND:
        return None, "it does not know this group yet, or its release of popgate does not know this request"
    return (answer.body, "") if answer.status == _OK else (None, f"it has answered with status {answer.status}")
