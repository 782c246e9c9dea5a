"""Lists names that the server knows, to suggest one in place of a name that does not exist, and to complete names.

A list that can't be read, because the server does not answer or the caller may not see it, is empty.
"""

import argparse
import copy

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed
from popgate.cli.suggestions import closest
from popgate_client import Client, GroupNotFound, LockNotFound, PopgateError, TopicNotFound

TOPICS, GROUPS, LOCKS = "topics", "groups", "locks"
PATIENCE_SECONDS = 0.0
"""Seconds for which an unanswered request for names is repeated: 0, because names are only a help."""


def known_names(arguments: argparse.Namespace, kind: str) -> list[str]:
    """Return the names of all topics, of the groups of ``arguments.topic``, or of all locks; an empty list if the
    server does not tell."""
    impatient = copy.copy(arguments)
    impatient.timeout = PATIENCE_SECONDS
    try:
        with open_client(impatient) as client:
            return sorted(_names(client, arguments, kind))
    except (PopgateError, CommandFailed):
        return []


def _names(client: Client, arguments: argparse.Namespace, kind: str) -> list[str]:
    if kind == TOPICS:
        return [topic["topic"] for topic in client.list_topics()]
    if kind == LOCKS:
        return [lock["name"] for lock in client.locks()]
    topic: str | None = getattr(arguments, "topic", None)
    names: list[str] = [] if topic is None else client.get_topic(topic)["groups"]
    return names


def suggested_name(error: PopgateError, arguments: argparse.Namespace) -> str | None:
    """Return the existing name that the user most likely meant, if ``error`` says that a name does not exist."""
    wanted: str | None
    if isinstance(error, TopicNotFound):
        kind, wanted = TOPICS, getattr(arguments, "topic", None)
    elif isinstance(error, GroupNotFound):
        kind, wanted = GROUPS, getattr(arguments, "group", None)
    elif isinstance(error, LockNotFound):
        kind, wanted = LOCKS, getattr(arguments, "name", None)
    else:
        return None
    known = [] if wanted is None else known_names(arguments, kind)
    return None if wanted is None or wanted in known else closest(wanted, known)
