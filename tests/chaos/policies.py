"""The operator of RabbitMQ, who sets policies on popgate's queues and removes them again.

This module owns the policies: those that a broker may have without harm, and one that drops messages. Under the latter
popgate promises only that each proxy warns of it in time.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from itertools import count

import httpx

from support.audit import Audit, now
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitCluster

CHECK_SECONDS = 1.0
"""Seconds between two checks by a proxy."""
WARNED_SECONDS = 5.0
"""Maximum seconds until all proxies have warned of a policy: four checks, on a busy machine."""
DISTURBED_SECONDS = 25.0
"""Seconds after a fault in which a proxy may not be able to check."""
HARMLESS: tuple[Mapping[str, object], ...] = (
    {"delivery-limit": 2_000_000_000},
    {"queue-leader-locator": "balanced"},
    {"delivery-limit": 2_000_000_000, "queue-leader-locator": "client-local"},
)
DROPS = {"message-ttl": 1_000}
QUEUES = "^popgate:audit:default:[0-9]+$"
"""The queues of the load; dead letters and redriven messages are not dropped."""
POLICIES, OPERATOR_POLICIES = "policies", "operator-policies"
PRIORITY = 7
API_SECONDS = 60.0
"""Maximum seconds for an answer of the management API after a node was lost."""


class Operator:
    """The operator of ``rabbit``. Records in ``audit`` when messages may be dropped, and complains of missing
    warnings.
    """

    def __init__(self, rabbit: RabbitCluster, proxies: ProxyCluster, audit: Audit) -> None:
        self._rabbit = rabbit
        self._proxies = proxies
        self._audit = audit
        self._numbers = count()
        self._harmless = ""

    async def change(self) -> None:
        """Set a policy that breaks no promise, or remove the present one."""
        if self._harmless:
            await self._call("DELETE", POLICIES, self._harmless)
            self._audit.mark(f"removed the policy {self._harmless}")
            self._harmless = ""
        else:
            number = next(self._numbers)
            self._harmless = f"harmless-{number}"
            await self._put(POLICIES, self._harmless, "^popgate:", HARMLESS[number % len(HARMLESS)])

    async def drop(self, seconds: float) -> None:
        """Let RabbitMQ drop, for ``seconds``, messages that wait for longer than a second."""
        number = next(self._numbers)
        kind, name = (POLICIES, OPERATOR_POLICIES)[number % 2], f"drops-{number}"
        began = now()
        await self._put(kind, name, QUEUES, DROPS)
        is_set = now()
        await asyncio.sleep(seconds)
        if now() - is_set >= WARNED_SECONDS:
            self._complain_of_silence(name, is_set)
        await self._call("DELETE", kind, name)
        self._audit.mark(f"removed the policy {name}")
        self._audit.may_drop(began, now())

    def end(self) -> None:
        """Complain of warnings about harmless policies."""
        for proxy in self._proxies.proxies:
            if "policy 'harmless-" in _log(proxy):
                self._audit.complain(f"{proxy.name} warns of a policy that breaks no promise")

    def _complain_of_silence(self, name: str, is_set: float) -> None:
        marks = [mark.what for mark in self._audit.marks if mark.at >= is_set - DISTURBED_SECONDS]
        for proxy in self._proxies.proxies:
            is_disturbed = any(proxy.name in what for what in marks)
            if not is_disturbed and f"policy '{name}' sets" not in _log(proxy):
                self._audit.complain(f"{proxy.name} does not warn of the policy {name}")

    async def _put(self, kind: str, name: str, pattern: str, definition: Mapping[str, object]) -> None:
        body = {"pattern": pattern, "definition": definition, "priority": PRIORITY, "apply-to": "queues"}
        await self._call("PUT", kind, name, body)
        self._audit.mark(f"set the policy {name}: {definition}")

    async def _call(self, method: str, kind: str, name: str, body: object = None) -> None:
        """Make a management call. Raises: TimeoutError if no node carries it out."""
        api = self._rabbit.nodes[0].api
        async with asyncio.timeout(API_SECONDS):
            while True:
                try:
                    await asyncio.to_thread(api, method, kind, self._proxies.vhost, name, body=body)
                except httpx.HTTPStatusError as error:
                    if error.response.status_code == HTTPStatus.NOT_FOUND:
                        return  # an earlier attempt has removed it
                except httpx.HTTPError:
                    pass
                else:
                    return
                await asyncio.sleep(CHECK_SECONDS)


def _log(proxy: ProxyProcess) -> str:
    return (proxy.folder / "output.log").read_text(errors="replace")
