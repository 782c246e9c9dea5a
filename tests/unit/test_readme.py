"""The README's statements about popgate's settings match `popgate.config`."""

import re
from pathlib import Path

from popgate.config.options import SETTINGS

README = Path(__file__).parents[2] / "README.md"


def settings_table() -> str:
    rows = ["| flag | variable | TOML key | default | what it is |", "|---|---|---|---|---|"]
    for setting in SETTINGS:
        rows.append(
            f"| `{setting.flag} {setting.metavar}` | `{setting.variable}` | `{setting.name}` | "
            f"{setting.shown_default()} | {setting.help} |"
        )
    return "\n".join(rows)


def test_the_readmes_settings_are_those_of_the_program() -> None:
    shown = re.search(r"<!-- settings -->\n(.*?)<!-- /settings -->", README.read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == settings_table(), "paste the table of the right-hand side into the README"
