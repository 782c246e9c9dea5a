"""A keys file that tests write as an administrator would, with an editor: principals, their grants, and keys."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from popgate.domain.permissions import Action


@dataclass(frozen=True, kw_only=True)
class Key:
    token: str
    id: str

    @classmethod
    def new(cls) -> "Key":
        id = secrets.token_hex(5)
        return cls(id=id, token=f"pg_{id}_{secrets.token_urlsafe(32)}")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}


class KeyFile:
    """A keys file that the tests write as an administrator would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.principals: dict[str, dict[str, Any]] = {}

    def principal(self, name: str, *grants: Mapping[str, object], **settings: object) -> Key:
        """Add a principal with one key. Return the key."""
        self.principals[name] = {"grants": list(grants), "keys": {}, **settings}
        return self.key(name)

    def key(self, name: str, *, expires: datetime | None = None) -> Key:
        key = Key.new()
        self.principals[name]["keys"][key.id] = (sha256(key.token.encode()).hexdigest(), expires)
        self.write()
        return key

    def revoke(self, key: Key) -> None:
        for principal in self.principals.values():
            principal["keys"].pop(key.id, None)
        self.write()

    def write(self) -> None:
        lines: list[str] = []
        for name, settings in self.principals.items():
            lines.append(f"[principals.{json.dumps(name)}]")
            lines += [f"{field} = {toml(value)}" for field, value in settings.items() if field != "keys"]
            for id, (hashed, expires) in settings["keys"].items():
                lines += [f"[principals.{json.dumps(name)}.keys.{id}]", f'sha256 = "{hashed}"']
                lines.append(f"created = {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")
                if expires is not None:
                    lines.append(f"expires = {expires:%Y-%m-%dT%H:%M:%S.%fZ}")
        new = self.path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text("\n".join(lines) + "\n")
        new.rename(self.path)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in fields.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, cast("list[Any]", value))) + "]"
    return json.dumps(value)


def everything(**patterns: object) -> dict[str, object]:
    return {"actions": [action.value for action in Action], "queues": ["*"], **patterns}
