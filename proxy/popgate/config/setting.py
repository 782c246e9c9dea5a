"""Defines the description of a setting. The metadata of a field in ``ServeOptions`` contains the description."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The description of one setting.

    ``parse`` converts a text or a TOML value to the value of the option. For an invalid value, it raises ValueError
    with a text that describes a correct value. ``option_name`` is the name of the field in ``ServeOptions``. It usually
    equals ``name``. The value of a ``hidden`` setting may contain a credential: it must not be shown anywhere.
    """

    name: str
    option_name: str
    help: str
    parse: Callable[[object], object]
    default: object
    metavar: str
    default_text: str
    hidden: bool = False

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
    hidden: bool = False,
) -> Any:
    """Return a field for ``ServeOptions``.

    Give ``name`` if the name of the setting differs from the name of the field. ``hidden`` as in ``Setting``; the
    option is then left out of the ``repr`` of the options.
    """
    described = {"help": help, "parse": parse, "default": default, "metavar": metavar, "default_text": default_text}
    described |= {"hidden": hidden}
    return dataclasses.field(repr=not hidden, metadata=described if name is None else {"name": name, **described})
