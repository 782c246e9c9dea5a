"""The sample configuration file has every setting, and each of its values is accepted."""

import tomllib
from pathlib import Path

import pytest

from popgate.config.options import SETTINGS
from popgate.config.sample import EXAMPLES, sample, sample_value
from popgate.config.setting import Setting

SHIPPED = Path(__file__).parents[2] / "deploy" / "popgate.toml"


def uncommented() -> dict[str, object]:
    return tomllib.loads("\n".join(line.removeprefix("#") for line in sample().splitlines() if line[1:2] != " "))


def test_the_shipped_sample_is_that_of_the_program() -> None:
    assert SHIPPED.read_text() == sample(), "run: popgate config sample > deploy/popgate.toml"


def test_the_sample_has_every_setting_and_changes_nothing_as_it_is() -> None:
    assert list(uncommented()) == [setting.name for setting in SETTINGS]
    assert tomllib.loads(sample()) == {}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_value_of_the_sample_is_the_default_or_a_valid_example(setting: Setting) -> None:
    parsed = setting.parse(uncommented()[setting.name])
    if setting.name not in EXAMPLES:
        assert parsed == setting.default == sample_value(setting)
