"""Serves ``/v1/admin/log-level``: shows and changes the level of the log while the proxies run."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from popgate.api.openapi_errors import problem_responses
from popgate.api.problems import ProxyNotFound
from popgate.api.request_ids import id_headers
from popgate.api.scope_keys import caller_of, forwarding_of
from popgate.domain.errors import PeerUnavailable
from popgate.domain.names import InstanceId
from popgate.engine.engine import Engine
from popgate.ports.peers import ForwardedRequest, Peers
from popgate.runtime.log_levels import LogLevels

ASKED_SECONDS = 3.0
"""Maximum seconds for another proxy's answer."""
CHANGE_SECONDS_MAX = 7 * 86_400.0
LevelName = Literal["debug", "info", "warning", "error"]
ProxyInQuery = Annotated[str | None, Query(description="id of one proxy of the cluster; without it, all proxies")]


class LogLevelChange(BaseModel):
    """The level from which on messages are logged. After ``seconds``, the configured level applies again."""

    model_config = ConfigDict(extra="forbid")

    level: LevelName
    seconds: Annotated[float | None, Field(gt=0, le=CHANGE_SECONDS_MAX)] = None


class ProxyLevelAnswer(BaseModel):
    """The level of one proxy, and the level in its settings. Both are null if the proxy does not answer.

    ``seconds_left``: after this time the configured level applies again. It is null if a change has no end.
    """

    proxy: str
    level: LevelName | None
    configured: LevelName | None
    seconds_left: float | None = None


class LogLevelAnswer(BaseModel):
    """The levels of the proxies."""

    proxies: list[ProxyLevelAnswer]


def log_level_router(engine: Engine, peers: Peers | None, levels: LogLevels) -> APIRouter:
    """Return the routes that show and change the level. ``peers`` sends requests to the other proxies, or is None for a
    proxy that runs alone."""
    router = APIRouter(tags=["admin"], responses=problem_responses(400, 404, 503))
    path = "/v1/admin/log-level"

    async def answer(request: Request, proxy: str | None, change: LogLevelChange | None) -> LogLevelAnswer:
        """Change the level of the named proxies, if ``change`` is given, and return their levels."""
        status = engine.cluster_status()
        members = [member.instance for member in status.members] or [status.me]
        if forwarding_of(request.scope) is not None:
            members = [status.me]
        elif proxy is not None:
            if proxy not in members:
                raise ProxyNotFound(proxy)
            members = [InstanceId(proxy)]
        if status.me in members and change is not None:
            levels.change(change.level, change.seconds)
        here = ProxyLevelAnswer.model_validate(
            {
                "proxy": status.me,
                "level": levels.level,
                "configured": levels.configured,
                "seconds_left": levels.seconds_left,
            }
        )
        others = [member for member in members if member != status.me]
        asked = _asked(request, change)
        found = [] if peers is None else await asyncio.gather(*(_ask(peers, one, asked) for one in others))
        return LogLevelAnswer(proxies=[*([here] if status.me in members else []), *found])

    @router.get(path)
    async def get_log_level(request: Request, proxy: ProxyInQuery = None) -> LogLevelAnswer:
        """Return from which level on each proxy logs messages."""
        return await answer(request, proxy, None)

    @router.put(path, responses=problem_responses(413, 415))
    async def put_log_level(change: LogLevelChange, request: Request, proxy: ProxyInQuery = None) -> LogLevelAnswer:
        """Change from which level on the proxies log messages, until they are restarted, or for some seconds. A proxy
        that can't be reached keeps its level, and is answered with the level null."""
        return await answer(request, proxy, change)

    return router


def _asked(request: Request, change: LogLevelChange | None) -> ForwardedRequest:
    """Return the request that the other proxies get."""
    method, body = ("GET", b"") if change is None else ("PUT", change.model_dump_json().encode())
    headers = id_headers(request.scope["headers"])
    headers.append((b"content-type", b"application/json"))
    return ForwardedRequest(method, request.url.path, b"", headers, body, caller=caller_of(request.scope))


async def _ask(peers: Peers, member: InstanceId, asked: ForwardedRequest) -> ProxyLevelAnswer:
    """Ask another proxy. If it does not answer, or is too old to know the request, its level is None."""
    try:
        async with asyncio.timeout(ASKED_SECONDS):
            answer = await peers.forward(member, asked, wait_seconds=0.0)
        return LogLevelAnswer.model_validate_json(answer.body).proxies[0]
    except (PeerUnavailable, TimeoutError, ValidationError, IndexError):
        return ProxyLevelAnswer(proxy=member, level=None, configured=None)
