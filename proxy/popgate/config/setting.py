"""The description of one setting, which stands at its field in ``ServeOptions``."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. ``parse`` turns text or a TOML value into the option, or raises ValueError saying what would be
    right.

    ``option_name`` is the field's name in ``ServeOptions``; only some of them differ from the setting's ``name``.
    """

    name: str
    option_name: str
    help: str
    parse: Callable[[object], object]
    default: object
    metavar: str
    default_text: str

    @classmethod
    def of(cls, field: "dataclasses.Field[Any]") -> "Setting":
        described: dict[str, Any] = {"name": field.name, "option_name": field.name, **field.metadata}
        return cls(**described)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "POPGATE_" + self.name.upper()

    def shown_default(self) -> str:
        return self.default_text or str(self.default)


def setting(
    help: str,
    parse: Callable[[object], object],
    default: object,
    metavar: str,
    *,
    default_text: str = "",
    name: str | None = None,
) -> Any:
    """Return a field of ``ServeOptions``. ``name``: the setting's name, if it differs from the field's."""
    described = {"help": help, "parse": parse, "default": default, "metavar": metavar, "default_text": default_text}
    return dataclasses.field(metadata=described if name is None else {"name": name, **described})
