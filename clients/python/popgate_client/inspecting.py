"""Builds the paths of an operator's questions: why a pop gets nothing, what is in a group, where a message is.

Does no I/O.
"""

from urllib.parse import urlencode

from popgate_client.wire import admin_path


def explain_path(topic: str, group: str) -> str:
    return f"{admin_path(topic, group)}/explain"


def peek_path(
    topic: str, group: str, *, state: str | None, key: str | None, limit: int | None, after: str | None, fetch: bool
) -> str:
    query = {"state": state, "key": key, "limit": limit, "after": after, "fetch": "true" if fetch else None}
    given = urlencode({name: value for name, value in query.items() if value is not None})
    return f"{admin_path(topic, group)}/messages" + (f"?{given}" if given else "")


def message_path(topic: str, message_id: str, *, fetch: bool) -> str:
    # In the query, because a message id may contain a slash.
    query = {"find": message_id, **({"fetch": "true"} if fetch else {})}
    return f"{admin_path(topic)}/messages?{urlencode(query)}"
