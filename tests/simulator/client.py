"""A client of the simulation: tries one proxy after the other, and records the answers."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from popgate.domain.errors import PopgateError, RetryLater, WrongMode
from popgate.engine.lease.pop_request import Presence
from simulator.face import Face, Served
from simulator.network import Answered, Network
from support.audit import Audit
from support.audit_client import NOT_SENT, AuditedClient

TIMEOUT_SECONDS = 9.0
"""Seconds; longer than any pop waits, and shorter than the longest pauses."""
REST_SECONDS = 0.1, 0.6


class SimulatedClient(AuditedClient):
    """``up``: the proxies that listen at the moment."""

    def __init__(
        self, audit: Audit, face: Face, network: Network, up: Callable[[], Sequence[Served]], chance: random.Random
    ) -> None:
        super().__init__(audit, topic=face.topic)
        self._face = face
        self._network = network
        self._up = up
        self._chance = chance

    async def request(self, method: str, path: str, body: object = None) -> dict[str, Any] | None:
        up = self._up()
        proxy = self._chance.choice(up) if up else None
        presence = Presence()
        try:
            if proxy is None:
                raise ConnectionRefusedError("no proxy listens")
            return await self._network.exchange(
                proxy.process,
                self._work(proxy, path, body, presence),
                seconds=TIMEOUT_SECONDS,
                leave=presence.leave,
            )
        except ConnectionRefusedError:
            answer: dict[str, Any] | None = NOT_SENT
        except OSError:
            answer = None
        except WrongMode:  # the mode is being switched; a pop with this answer got nothing
            answer = NOT_SENT
        except RetryLater as error:
            self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
            answer = None
        except PopgateError as error:
            self.audit.complain(f"{method} {path}: {error.code} {error.detail}")
            answer = None
        await asyncio.sleep(self._chance.uniform(*REST_SECONDS))
        return answer

    def _work(
        self, proxy: Served, path: str, body: Any, presence: Presence
    ) -> Callable[[], Awaitable[Answered[dict[str, Any]]]]:
        path, _, query = path.partition("?")
        face, verb = self._face, path.rpartition("/")[2]
        match verb:
            case "messages":
                return partial(face.publish, proxy, body["messages"])
            case "pop":
                return partial(face.pop, proxy, body, presence)
            case "ack" | "release" | "extend" | "reject":
                return partial(face.settle, proxy, verb, body)
            case "redrive":
                return partial(face.redrive, proxy, body)
            case "dead-letters":
                after = query.rpartition("after=")[2] if "after=" in query else ""
                return partial(face.dead_letters, proxy, unquote(after) or None)
            case _:
                return partial(face.state, proxy)
