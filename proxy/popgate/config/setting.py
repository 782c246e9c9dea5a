"""The description of one setting."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. ``parse`` turns text or a TOML value into the option, or raises ValueError saying what would be
    right.

    ``option`` is the field's name in ``ServeOptions``, if it differs from the setting's.
    """

    name: str
    help: str
    parse: Callable[[object], object]
    default: object
    default_text: str = ""
    metavar: str = "VALUE"
    option: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "POPGATE_" + self.name.upper()

    @property
    def option_name(self) -> str:
        return self.option or self.name

    def shown_default(self) -> str:
        return self.default_text or str(self.default)
