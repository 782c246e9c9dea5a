"""Reads from RabbitMQ's management interface which member consumes which queue. The answer is up to 5 s old, and not a
consistent snapshot.

It has one row per consumer; the consumer tag contains the member's name. Rows without a channel are stale rows of
deleted queues.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from popgate_client.amqp.balance import QueueView, Waiting
from popgate_client.amqp.roster import GroupView
from popgate_client.transport import private_connection

TIMEOUT_SECONDS = 5.0
COLUMNS = "queue.name,consumer_tag,active,arguments,channel_details.name"
TAG_PREFIX = "popgate-pull"
STRANGER = "\x00"
"""Stands for a consumer that is not a member's; it keeps its queues."""


def consumer_tag(member: str, number: int) -> str:
    """Return the tag of a member's consumer; operators see it in the management interface."""
    return f"{TAG_PREFIX} {member} {number}"


class ManagementClosed(Exception):
    """The interface is not available to this user: wrong credentials, no permission, or a wrong address."""


class ManagementUnreachable(Exception):
    """The interface did not answer this time."""


class _Row(NamedTuple):
    queue: str
    tag: str
    member: str
    priority: int
    is_active: bool


class Management:
    """Reads the management interface at `url`, which includes credentials: `http://user:password@host:15672`.

    Raises: RequestInvalid if the file that SSL_CERT_FILE names can't be read.
    """

    def __init__(self, url: str, vhost: str) -> None:
        self._path = f"/api/consumers/{quote(vhost, safe='')}"
        self._http = httpx.AsyncClient(**private_connection(httpx.URL(url)), timeout=TIMEOUT_SECONDS)

    async def close(self) -> None:
        await self._http.aclose()

    async def look(self, me: str, queues: Sequence[str]) -> GroupView:
        """Return a view for the plan. Raises: ManagementClosed, ManagementUnreachable."""
        try:
            answer = await self._http.get(self._path, params={"columns": COLUMNS})
        except (httpx.HTTPError, OSError) as error:
            raise ManagementUnreachable(repr(error)) from error
        if answer.status_code in (401, 403, 404, 405):
            raise ManagementClosed(f"{answer.status_code} {answer.reason_phrase}")
        try:
            answer.raise_for_status()
            rows = [row for each in answer.json() if (row := _row(each)) is not None and row.queue in set(queues)]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManagementUnreachable(repr(error)) from error
        return _group_view(rows, me, queues)


def _row(row: dict[str, Any]) -> _Row | None:
    if not row.get("channel_details"):
        return None
    tag = str(row["consumer_tag"])
    parts = tag.split(" ")
    member = parts[1] if len(parts) == 3 and parts[0] == TAG_PREFIX else STRANGER
    arguments: dict[str, Any] = row.get("arguments") or {}
    priority: object = arguments.get("x-priority", 0)
    is_active = row.get("active", False)
    return _Row(str(row["queue"]["name"]), tag, member, priority if isinstance(priority, int) else 0, is_active is True)


def _group_view(rows: Sequence[_Row], me: str, queues: Sequence[str]) -> GroupView:
    tags: dict[str, set[str]] = {me: set()}
    active: dict[str, _Row] = {}
    waiting: dict[str, list[Waiting]] = {queue: [] for queue in queues}
    for row in rows:
        if row.member != STRANGER:
            tags.setdefault(row.member, set()).add(row.tag)
        if row.is_active:
            active[row.queue] = row
        else:
            waiting[row.queue].append(Waiting(row.member, row.priority))
    views = {queue: QueueView(None, 0, tuple(waiting[queue])) for queue in queues}
    for queue, row in active.items():
        views[queue] = QueueView(row.member, row.priority, tuple(waiting[queue]))
    return GroupView(
        members=sorted(tags),
        queues=views,
        tags={member: frozenset(of_member) for member, of_member in tags.items()},
        active_tags=frozenset(row.tag for row in active.values()),
    )
