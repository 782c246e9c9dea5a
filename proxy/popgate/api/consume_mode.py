"""Serves the consume mode of a group: switch, preview, and the state of all proxies (decision 10).

The shared state contains the mode that was decided for a group. Each proxy stores only in its own memory which mode it
serves, so the proxy that answers a client asks all other proxies. A proxy that another proxy asks reports only its own
mode.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from popgate.api.openapi_errors import problem_responses
from popgate.api.request_ids import id_headers
from popgate.api.scope_keys import caller_of, forwarding_of
from popgate.api.visit import Sight, visit_of
from popgate.domain.errors import PeerUnavailable
from popgate.domain.modes import DRAIN_SECONDS, DRAIN_SECONDS_MAX, switched
from popgate.domain.names import NAME_PATTERN, InstanceId
from popgate.domain.topics import ConsumeMode
from popgate.engine.engine import Engine
from popgate.engine.subscription.mode_status import ModeStanding
from popgate.ports.peers import ForwardedRequest, Peers

ASKED_SECONDS = 2.0
"""Maximum seconds to wait until a proxy reports which mode it serves. After that, the proxy counts as unreachable."""
_OK = 200

ModeName = Literal["pop", "draining", "pull"]
TopicInPath = Annotated[str, Path(pattern=NAME_PATTERN)]
GroupInPath = Annotated[str, Path(pattern=NAME_PATTERN)]


class ConsumeModeChange(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    mode: Literal["pop", "pull"]
    drain_timeout_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=DRAIN_SECONDS_MAX,
            description="how long leases have to end before they are cut off; if a drain is running, its time starts "
            f"again. Default for a switch to pull: {DRAIN_SECONDS:g}; for a switch to pop: no drain",
        ),
    ] = DRAIN_SECONDS
    dry_run: Annotated[bool, Field(description="only report what would happen")] = False

    @property
    def drain_seconds(self) -> float | None:
        return self.drain_timeout_seconds if "drain_timeout_seconds" in self.model_fields_set else None


class QueueLeasesAnswer(BaseModel):
    queue: int
    leases: int


class ProxyModeAnswer(BaseModel):
    """The mode that one proxy serves. ``mode`` and ``generation`` are null if the proxy does not answer, or does not
    know the group yet.

    ``pollers`` is the number of pops or pulls that wait at the proxy. ``queues`` lists the queues that the proxy owns.
    """

    proxy: str
    mode: ModeName | None
    generation: int | None
    converged: bool
    pollers: int = 0
    queues: list[QueueLeasesAnswer] = []


class PullClientAnswer(BaseModel):
    """A client that has registered for pull mode. ``generation`` is the latest one in which its queues changed.

    ``queues`` are the numbers of the queues from which it may pull; outside of pull mode, there are none. ``leaving``
    are those that it must release, because they go to another client. ``leases`` counts the messages of all these
    queues that are pulled and not committed.
    """

    client_id: str
    generation: int
    queues: list[int]
    leaving: list[int]
    leases: int


class DrainAnswer(BaseModel):
    """The progress of a drain. ``leases_left`` counts the leases at the proxies that answer."""

    leases_left: int
    seconds_left: float


class PreviewAnswer(BaseModel):
    """The effect that a switch would have. ``steps`` lists, in order, the modes that the group would enter. It is empty
    if the switch would change nothing.

    ``drain_timeout_seconds`` is null if the group would not drain. ``pollers`` (waiting pops or pulls),
    ``pull_clients`` and ``leases`` are the numbers of pops or pulls, clients and leases that the switch would affect.
    ``queues`` contains the number of leases of each queue.
    """

    steps: list[ModeName]
    drain_timeout_seconds: float | None
    pollers: int
    pull_clients: int
    leases: int
    queues: list[QueueLeasesAnswer]


class ConsumeModeAnswer(BaseModel):
    """The consume mode of a group. ``wanted`` is the mode that follows a drain, or the present mode if there is no
    drain.

    ``converged`` is true if the wanted mode is reached and every proxy serves it. ``preview`` is set for a dry run
    only.
    """

    topic: str
    group: str
    mode: ModeName
    generation: int
    wanted: Literal["pop", "pull"]
    converged: bool
    drain: DrainAnswer | None
    proxies: list[ProxyModeAnswer]
    clients: list[PullClientAnswer] = []
    preview: PreviewAnswer | None = None


def consume_mode_router(engine: Engine, peers: Peers | None) -> APIRouter:
    """Return the routes that show and switch a group's consume mode. ``peers`` sends requests to the other
    proxies, or is None for a proxy that runs alone."""
    router = APIRouter(tags=["admin"], responses=problem_responses(400, 404, 503))
    path = "/v1/admin/topics/{topic}/groups/{group}/consume-mode"

    async def answer(topic: str, group: str, request: Request, standing: ModeStanding) -> ConsumeModeAnswer:
        """Return a group's mode at all proxies. The caller must read ``standing`` before the proxies are asked.
        Otherwise ``standing`` could contain a change that a proxy had not yet applied when it was asked."""
        here = engine.mode_here(topic, group)
        proxies = [ProxyModeAnswer.model_validate({**here._asdict(), "queues": [], "converged": True})]
        proxies[0].queues = [QueueLeasesAnswer(queue=queue, leases=leases) for queue, leases in here.queues]
        if peers is not None and forwarding_of(request.scope) is None:
            members = [member.instance for member in engine.cluster_status().members if member.instance != here.proxy]
            headers = id_headers(request.scope["headers"])
            asked = ForwardedRequest("GET", request.url.path, b"", headers, b"", caller=caller_of(request.scope))
            proxies += await asyncio.gather(*(_ask(peers, member, asked) for member in members))
        return _answer(standing, proxies)

    @router.get(path)
    async def get_consume_mode(topic: TopicInPath, group: GroupInPath, request: Request) -> ConsumeModeAnswer:
        """Return the consume mode of a group, the progress of a drain, and which proxies serve the mode already."""
        return await answer(topic, group, request, await engine.mode_standing(topic, group))

    @router.put(path, responses=problem_responses(413, 415))
    async def put_consume_mode(
        topic: TopicInPath, group: GroupInPath, change: ConsumeModeChange, request: Request
    ) -> ConsumeModeAnswer:
        """Switch a group to pop or to pull. Before a switch to pull, the group drains: leases end, or are cut off after
        drain_timeout_seconds. The answer is sent when the switch has begun. Read the progress with GET. Idempotent. A
        switch back is possible while the group drains."""
        if not change.dry_run:
            sight = Sight(visit_of(request.scope))
            sight.park_behind(engine.topics)
            await engine.changes.switch(topic, group, ConsumeMode(change.mode), change.drain_seconds, sight.permit)
        standing = await engine.mode_standing(topic, group)
        answered = await answer(topic, group, request, standing)
        if change.dry_run:
            answered.preview = _preview(standing, change, answered.proxies)
        return answered

    return router


async def _ask(peers: Peers, member: InstanceId, request: ForwardedRequest) -> ProxyModeAnswer:
    """Ask another proxy about its mode. If that proxy does not answer, or does not know the group yet, the returned
    mode and generation are None."""
    try:
        async with asyncio.timeout(ASKED_SECONDS):
            answer = await peers.forward(member, request, wait_seconds=0.0)
        if answer.status == _OK:
            return ConsumeModeAnswer.model_validate_json(answer.body).proxies[0]
    except (PeerUnavailable, TimeoutError, ValidationError):
        pass
    return ProxyModeAnswer(proxy=member, mode=None, generation=None, converged=False)


def _answer(standing: ModeStanding, proxies: Sequence[ProxyModeAnswer]) -> ConsumeModeAnswer:
    spec = standing.spec
    for proxy in proxies:  # a proxy with a higher generation has already applied a later change
        proxy.converged = proxy.generation is not None and proxy.generation >= spec.mode_generation
    drain = None
    leases = _leases(proxies)
    if standing.seconds_left is not None:
        drain = DrainAnswer(leases_left=sum(leases.values()), seconds_left=standing.seconds_left)
    return ConsumeModeAnswer(
        topic=spec.subscription.topic,
        group=spec.subscription.group,
        mode=spec.mode.value,
        generation=spec.mode_generation,
        wanted="pull" if ConsumeMode.PULL in (spec.mode, spec.drain and spec.drain.to) else "pop",
        converged=drain is None and all(proxy.converged for proxy in proxies),
        drain=drain,
        proxies=list(proxies),
        clients=[
            PullClientAnswer(
                client_id=client.client_id,
                generation=client.generation,
                queues=client.queues,
                leaving=client.leaving,
                leases=sum(leases.get(queue, 0) for queue in (*client.queues, *client.leaving)),
            )
            for client in standing.clients
        ],
    )


def _leases(proxies: Sequence[ProxyModeAnswer]) -> dict[int, int]:
    """Return the number of leases at all of these proxies, by queue."""
    return {one.queue: one.leases for proxy in proxies for one in proxy.queues}


def _preview(standing: ModeStanding, change: ConsumeModeChange, proxies: Sequence[ProxyModeAnswer]) -> PreviewAnswer:
    spec = standing.spec
    after = switched(spec, ConsumeMode(change.mode), now=standing.now, drain_seconds=change.drain_seconds)
    steps: list[ModeName] = [] if after.mode is spec.mode else [after.mode.value]
    if after.drain is not None:
        steps.append("pull" if after.drain.to is ConsumeMode.PULL else "pop")
    leases = _leases(proxies)
    return PreviewAnswer(
        steps=steps,
        drain_timeout_seconds=None if after.drain is None else max(0.0, after.drain.ends_at - standing.now),
        pollers=sum(proxy.pollers for proxy in proxies),
        pull_clients=len(standing.clients),
        leases=sum(leases.values()),
        queues=[QueueLeasesAnswer(queue=queue, leases=count) for queue, count in sorted(leases.items())],
    )
