"""Implements a client for the parts of RabbitMQ's management API that the replica keeper and the doctor use.

If a node does not answer, the next node is tried.

After a node has failed, the usual request for the list of queues takes more than a minute, because RabbitMQ waits for
statistics from the failed node (seen on 3.10.8). But at this time, the replica keeper needs the list. So this client
requests the list without statistics.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

import httpx

from popgate.adapters.replicas.http_client import http_client
from popgate.adapters.replicas.reading import Row, as_object
from popgate.domain.errors import BrokerUnavailable, Conflict
from popgate.ports.replicas import Proof

_log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5.0
REASON_LENGTH_MAX = 300
CHANGE_SECONDS = 40.0
"""Maximum number of seconds for a request to a quorum queue endpoint. RabbitMQ itself limits a change to 30 s."""
WITHOUT_STATISTICS = {"disable_stats": "true", "enable_queue_totals": "true"}


class Management:
    """A client of the management API for one virtual host.

    ``urls`` are the URLs of nodes of the same cluster, such as ``http://user:password@host:15672``.
    """

    def __init__(self, urls: Sequence[str], vhost: str) -> None:
        self._vhost = quote(vhost, safe="")
        self._clients = [http_client(url, "/api/", timeout_seconds=TIMEOUT_SECONDS) for url in urls]
        self._places = [str(client.base_url.netloc.decode()) for client in self._clients]
        self._at = 0

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def overview(self) -> Row:
        """Return the answer of ``GET /api/overview``. Raises: BrokerUnavailable."""
        return as_object(_decoded(await self._request("GET", "overview")))

    async def tags_by_node(self) -> dict[str, Any]:
        """Return the ``node_tags`` of all nodes that answer, by node name.

        Each node is queried, because a node shows only its own tags.
        """
        tags: dict[str, Any] = {}
        for client in self._clients:
            try:
                answer = await client.get("overview", params={"columns": "node,node_tags"})
                row = as_object(answer.json() if answer.is_success else None)
            except (httpx.HTTPError, OSError, ValueError):
                continue
            if "node" in row:
                tags[str(row["node"])] = row.get("node_tags")
        return tags

    async def nodes(self) -> list[Row]:
        """Return the nodes of the cluster. Raises: BrokerUnavailable."""
        return await self._rows("nodes")

    async def queues(self) -> list[Row]:
        """Return the queues of the virtual host. Raises: BrokerUnavailable."""
        return await self._rows(f"queues/{self._vhost}", WITHOUT_STATISTICS)

    async def exchanges(self) -> list[Row]:
        """Return the exchanges of the virtual host. Raises: BrokerUnavailable."""
        return await self._rows(f"exchanges/{self._vhost}")

    async def queue(self, name: str) -> Row | None:
        """Return the queue ``name``, or None if it does not exist. Raises: BrokerUnavailable."""
        answer = await self._request("GET", f"queues/{self._vhost}/{quote(name, safe='')}", params=WITHOUT_STATISTICS)
        if answer.status_code == 404:
            return None
        return as_object(_decoded(answer))

    async def consumers(self) -> list[Row]:
        """Return the consumers in the virtual host.

        RabbitMQ takes them from its statistics, which may be some seconds old.

        Raises: BrokerUnavailable, also if RabbitMQ collects no statistics.
        """
        return await self._rows(f"consumers/{self._vhost}")

    async def policies(self) -> list[Row]:
        """Return the policies of the virtual host. Raises: BrokerUnavailable."""
        return await self._rows(f"policies/{self._vhost}")

    async def operator_policies(self) -> list[Row]:
        """Return the operator policies of the virtual host. Raises: BrokerUnavailable."""
        return await self._rows(f"operator-policies/{self._vhost}")

    async def feature_flags(self) -> list[Row]:
        """Return the feature flags of the cluster. Raises: BrokerUnavailable."""
        return await self._rows("feature-flags")

    async def permissions(self, user: str) -> Row | None:
        """Return the user's permissions in the virtual host. Raises: BrokerUnavailable.

        Return None if RabbitMQ stores no permissions for this user, for example because another service manages them.
        """
        answer = await self._request("GET", f"permissions/{self._vhost}/{quote(user, safe='')}")
        return None if answer.status_code == 404 else as_object(_decoded(answer))

    async def effective_configuration(self) -> str | None:
        """Return the configuration of a node as Erlang terms, or None if RabbitMQ does not show it (before 3.13).

        Raises: BrokerUnavailable.
        """
        answer = await self._request("GET", "config/effective")
        return answer.text if answer.is_success else None

    async def date(self) -> str | None:
        """Return the present time of a node's clock, as an HTTP date. Raises: BrokerUnavailable."""
        date: str | None = (await self._request("GET", "whoami")).headers.get("date")
        return date

    async def set_policy(self, name: str, policy: Row, *, is_operator: bool = False) -> None:
        """Create a policy, or replace it completely. Raises: BrokerUnavailable, Conflict."""
        kind = "operator-policies" if is_operator else "policies"
        await self._put(f"{kind}/{self._vhost}/{quote(name, safe='')}", policy)

    async def set_permissions(self, user: str, permissions: Row) -> None:
        """Set the user's permissions in the virtual host. Raises: BrokerUnavailable, Conflict."""
        await self._put(f"permissions/{self._vhost}/{quote(user, safe='')}", permissions)

    async def has_feature_flag(self, name: str) -> bool | None:
        """Return whether the feature flag ``name`` is enabled, or None if it does not exist.

        Raises: BrokerUnavailable.
        """
        rows = await self.feature_flags()
        states = [row.get("state") for row in rows if row.get("name") == name]
        return states[0] == "enabled" if states else None

    async def allows(self, method: str, what: str) -> bool:
        """Return whether the quorum queue endpoint ``what`` exists and accepts ``method``.

        The answer to an OPTIONS request shows this. The queue in the request does not have to exist. If an
        administrator has disabled the endpoint, the result is False.

        Raises: BrokerUnavailable.
        """
        answer = await self._request("OPTIONS", self._path("-", what))
        return answer.is_success and method in answer.headers.get("allow", "").replace(" ", "").split(",")

    async def quorum(
        self, method: str, name: str, what: str, body: object = None, prove: Proof | None = None
    ) -> httpx.Response:
        """Send a request to the quorum queue endpoint ``what`` of the queue ``name``, and return the answer.

        ``prove`` is called right before each attempt to send the request.

        Raises: BrokerUnavailable.
        """
        return await self._request(method, self._path(name, what), json=body, seconds=CHANGE_SECONDS, prove=prove)

    def _path(self, name: str, what: str) -> str:
        return f"queues/quorum/{self._vhost}/{quote(name, safe='')}/{what}"

    async def _put(self, path: str, body: Row) -> None:
        answer = await self._request("PUT", path, json=body)
        if not answer.is_success:
            raise Conflict(f"PUT /api/{path} was answered {answer.status_code}: {answer.text[:REASON_LENGTH_MAX]}")

    async def _rows(self, path: str, params: Mapping[str, str] | None = None) -> list[Row]:
        """Return the objects in the answer to a GET request.

        Raises: BrokerUnavailable, also if the answer is not a list.

        If the method returned an empty list instead of raising, the nodes of members would be considered removed.
        """
        rows: Any = _decoded(await self._request("GET", path, params=params))
        if not isinstance(rows, list):
            raise BrokerUnavailable(f"the answer to GET /api/{path} is not from a management API: it is not a list")
        return [as_object(row) for row in cast("list[object]", rows)]

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        json: object = None,
        seconds: float = TIMEOUT_SECONDS,
        prove: Proof | None = None,
    ) -> httpx.Response:
        """Send a request to one node after another until a node answers. Return the answer.

        If it is unknown whether a node has made a change, the request is not sent to another node, because the change
        could then be made twice.
        """
        reasons: list[str] = []
        for step in range(len(self._clients)):
            at = (self._at + step) % len(self._clients)
            if prove is not None:
                await prove()
            try:
                answer = await self._clients[at].request(
                    method, path, params=params, json=json, timeout=httpx.Timeout(seconds, connect=TIMEOUT_SECONDS)
                )
            except (httpx.HTTPError, OSError) as error:
                reasons.append(f"{self._places[at]}: {str(error) or type(error).__name__}")
                if json is not None and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    break
                continue
            if answer.status_code >= 500 and json is None and step + 1 < len(self._clients):
                reasons.append(f"{self._places[at]}: {answer.status_code}")  # the node starts, stops, or was cut off
                continue
            self._at = at
            if answer.status_code in (401, 403):
                raise BrokerUnavailable(
                    f"the management API at {self._places[at]} refuses this user ({answer.status_code}): it needs the "
                    "tag administrator (or monitoring, to look only)"
                )
            return answer
        raise BrokerUnavailable(f"the management API does not answer: {'; '.join(reasons)}")


def _decoded(answer: httpx.Response) -> Any:
    try:
        return answer.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError) as error:
        place = f"{answer.url.host}:{answer.url.port}"
        raise BrokerUnavailable(f"the answer at {place} is not from a management API: {answer.status_code}") from error
