"""Reads the numbers of replicas that groups require from a proxy.

A replica keeper that runs outside of a proxy uses this module.
"""

from collections.abc import Callable, Sequence
from http import HTTPStatus

import httpx
import msgspec

from popgate.adapters.replicas.http_client import http_client
from popgate.domain.errors import PeerUnavailable
from popgate.domain.names import BrokerQueue, GroupName, Subscription, TopicName
from popgate.domain.replica_wanted import GroupReplicas
from popgate.ports.replicas import ReplicaGroups

TIMEOUT_SECONDS = 2.0
PATH = "/v1/admin/replicas/"
_ACTION = "inspect"
"""The permission that ``PATH`` needs."""
REMEDY = "fix that, or omit --groups-url; groups' own min_replicas are then ignored"


class _Group(msgspec.Struct):
    topic: str
    group: str
    min_replicas: int
    queues: list[str]


class _Answer(msgspec.Struct):
    vhost: str | None
    groups: list[_Group]


class ProxyReplicaGroups:
    """Reads the numbers of replicas from the first proxy that answers and uses the same virtual host as the keeper.

    ``urls`` are the URLs of proxies of one cluster. ``vhost`` is the virtual host of the keeper. ``token`` returns the
    token of the moment, which the proxies or a gateway may require. It is called for each reading, because a token may
    be replaced while the keeper runs.
    """

    def __init__(self, urls: Sequence[str], vhost: str, token: Callable[[], str] | None) -> None:
        self._vhost = vhost
        self._token = token
        self._clients = [http_client(url, PATH, timeout_seconds=TIMEOUT_SECONDS) for url in urls]

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def asking(self) -> Sequence[GroupReplicas]:
        """Raises: PeerUnavailable, also from ``token``."""
        reasons: list[str] = []
        headers = None if self._token is None else {"authorization": f"Bearer {self._token()}"}
        for client in self._clients:
            place = f"{client.base_url.host}:{client.base_url.port or client.base_url.scheme}"
            try:
                answer = await client.get("groups", headers=headers)
                told = msgspec.json.decode(answer.raise_for_status().content, type=_Answer)
            except httpx.HTTPStatusError as error:
                reasons.append(f"{place} answers {error.response.status_code}{_hint(error.response)}")
            except (httpx.HTTPError, OSError) as error:
                reasons.append(f"{place}: {str(error) or type(error).__name__}")
            except (msgspec.DecodeError, UnicodeDecodeError):
                reasons.append(f"{place} is not a popgate proxy")
            else:
                if told.vhost == self._vhost:
                    return [_read(group) for group in told.groups]
                where = "has no RabbitMQ" if told.vhost is None else f"uses the virtual host {told.vhost!r}"
                reasons.append(f"{place} {where}, and the queues are in {self._vhost!r}")
        raise PeerUnavailable(f"no proxy reports the replicas of its groups ({'; '.join(reasons)}): {REMEDY}")


def _hint(answer: httpx.Response) -> str:
    """Say what is missing if the proxy refuses the caller."""
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return ": it requires a valid key or token in POPGATE_TOKEN or --token-file"
    if answer.status_code == HTTPStatus.FORBIDDEN:
        return f": the key or token needs the permission '{_ACTION}'"
    return ""


def _read(group: _Group) -> GroupReplicas:
    name = Subscription(TopicName(group.topic), GroupName(group.group))
    return GroupReplicas(name, group.min_replicas, [BrokerQueue(queue) for queue in group.queues])


_conforms: type[ReplicaGroups] = ProxyReplicaGroups
