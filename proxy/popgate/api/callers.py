"""Serves ``GET /v1/caller``: who the caller is, and what the caller may do. The console and other tools disable what
would be refused."""

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from popgate.api.openapi_errors import problem_responses
from popgate.api.scope_keys import caller_of
from popgate.domain.permissions import Action, Grant


class GrantAnswer(BaseModel):
    """Actions that are permitted on the names that match a pattern. In a pattern, ``*`` matches any characters."""

    actions: list[str]
    topics: list[str]
    groups: list[str]
    locks: list[str]
    queues: Annotated[list[str], Field(description="queues of RabbitMQ that may be adopted")]


class CallerAnswer(BaseModel):
    """The caller of this request. Without authentication, every caller may do everything, and ``principal``,
    ``credential`` and ``expires_at`` are null."""

    authenticated: Annotated[bool, Field(description="false: the proxy authenticates no callers")]
    insecure: Annotated[
        bool, Field(description="true: other machines reach the proxy without authentication or without TLS")
    ]
    principal: str | None
    credential: Annotated[str | None, Field(description="id of the key, or name of the token or certificate")]
    expires_at: Annotated[float | None, Field(description="Unix seconds; null: the credential does not expire")]
    grants: list[GrantAnswer]


def callers_router(*, is_insecure: bool) -> APIRouter:
    """Return the route that describes its caller. ``is_insecure``: other machines can reach the server without
    authentication or without TLS."""
    router = APIRouter(tags=["server"], responses=problem_responses())

    @router.get("/v1/caller")
    async def get_caller(request: Request) -> CallerAnswer:
        """Return who the caller is, and its grants. A grant says which actions are permitted on which names."""
        caller = caller_of(request.scope)
        if caller is None:
            everything = GrantAnswer(actions=sorted(Action), topics=["*"], groups=["*"], locks=["*"], queues=["*"])
            return CallerAnswer(
                authenticated=False,
                insecure=is_insecure,
                principal=None,
                credential=None,
                expires_at=None,
                grants=[everything],
            )
        return CallerAnswer(
            authenticated=True,
            insecure=is_insecure,
            principal=caller.principal.name,
            credential=caller.credential,
            expires_at=caller.expires_at,
            grants=[_grant(grant) for grant in caller.principal.grants],
        )

    return router


def _grant(grant: Grant) -> GrantAnswer:
    return GrantAnswer(
        actions=sorted(grant.actions),
        topics=list(grant.topics),
        groups=list(grant.groups),
        locks=list(grant.locks),
        queues=list(grant.queues),
    )
