"""Applies advice: compares it with the proxies' current settings, and changes them through the admin interface.

Owns which settings may be changed this way: those of a group's policy. Operators change queues and consumers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from popgate_client.client import Client
from popgate_client.errors import GroupNotFound, TopicNotFound
from popgate_spark.jobs.advice import Advice

APPLICABLE = ("invisibility_seconds", "max_in_flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    topic: str
    group: str
    setting: str
    present: object
    wanted: float

    def __str__(self) -> str:
        return f"{self.topic}/{self.group}: {self.setting} {self.present} -> {self.wanted:g}"


def differences(client: Client, advice: Sequence[Advice], settings: Sequence[str]) -> list[Change]:
    """Return the settings that differ from the advice; deleted groups are left out.

    Raises: what the client raises.
    """
    changes: list[Change] = []
    policies: dict[tuple[str, str], dict[str, Any] | None] = {}
    for one in advice:
        if one.setting not in settings or one.wanted is None:
            continue
        name = (one.topic, one.group)
        if name not in policies:
            policies[name] = _policy(client, *name)
        policy = policies[name]
        if policy is not None and policy.get(one.setting) != one.wanted:
            present = policy.get(one.setting)
            changes.append(
                Change(topic=one.topic, group=one.group, setting=one.setting, present=present, wanted=one.wanted)
            )
    return changes


def apply(client: Client, changes: Sequence[Change], told: Callable[[str], None]) -> None:
    """Make the changes one after the other, and report each to `told`. Raises: what the client raises; reported changes
    are done."""
    for change in changes:
        wanted = int(change.wanted) if change.setting == "max_in_flight" else change.wanted
        settings: Any = {change.setting: wanted}
        client.put_group(change.topic, change.group, **settings)
        told(f"changed {change}")


def _policy(client: Client, topic: str, group: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = dict(client.get_group(topic, group))
    except (TopicNotFound, GroupNotFound):
        return None
    return dict(found.get("policy", found))
