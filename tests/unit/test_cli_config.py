"""`popgate config`: each wrong setting is named with its line and the remedy, and credentials are not shown."""

import json
from pathlib import Path

import pytest

from popgate.cli.commands import run
from popgate.config.options import SETTINGS

PASSWORD = "pa55word"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("POPGATE_CONFIG", raising=False)


def written(folder: Path, *lines: str) -> str:
    file = folder / "popgate.toml"
    file.write_text("\n".join(lines))
    file.chmod(0o600)
    return str(file)


def test_all_wrong_settings_are_reported_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "# settings", 'port = "many"', "", "'prot' = 1", f'amqp_url = "http://u:{PASSWORD}@h/"')
    assert run(["config", "check", file]) == 2
    said = capsys.readouterr().err
    assert f"line 2: port in {file}: must be a whole number from 1 to 65535" in said
    assert f"line 4: prot in {file}: no such setting; did you mean port?" in said
    assert f"line 5: amqp_url in {file}: " in said
    assert PASSWORD not in said


def test_a_contradiction_is_reported_with_the_line_of_its_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "port = 9000", f'redis_url = "redis://:{PASSWORD}@h/0"')
    assert run(["config", "check", file]) == 2
    said = capsys.readouterr().err
    assert "redis_url: needs amqp_url" in said
    assert f"[line 2: redis_url in {file}]" in said


def test_a_file_that_is_not_toml_and_missing_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "check", written(tmp_path, "port = 1", "port")]) == 2
    assert "is not TOML (Expected '=' after a key in a key/value pair (at end of document))" in capsys.readouterr().err
    assert run(["config", "check", str(tmp_path / "none.toml")]) == 2
    assert "can't be read (No such file or directory)" in capsys.readouterr().err
    keys = tmp_path / "keys.toml"
    keys.write_text("[principals.a]\nroles = ['king']\n")
    keys.chmod(0o600)
    certificate = tmp_path / "tls.crt"
    lines = [f'keys_file = "{keys}"', f'tls_certificate_file = "{certificate}"', f'tls_key_file = "{certificate}"']
    assert run(["config", "check", written(tmp_path, *lines)]) == 2
    said = capsys.readouterr().err
    assert "keys_file: " in said
    assert "king" in said
    assert "tls_certificate_file: " in said


def test_a_right_file_is_said_to_be_right_and_shown_without_credentials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "port = 9000", f'amqp_url = "amqp://u:{PASSWORD}@h/"')
    monkeypatch.setenv("POPGATE_LOG_LEVEL", "debug")
    assert run(["config", "check", file]) == 0
    assert "the configuration is right: 3 settings are given" in capsys.readouterr().out
    assert run(["config", "show", file, "--changed"]) == 0
    shown = capsys.readouterr().out
    rows = {row["setting"]: row for row in map(json.loads, shown.splitlines())}
    assert rows["port"] == {"setting": "port", "value": "9000", "source": f"line 1: port in {file}"}
    assert rows["log_level"]["source"] == "POPGATE_LOG_LEVEL"
    assert rows["amqp_url"]["value"] == "(hidden)"
    assert set(rows) == {"port", "log_level", "amqp_url"}
    assert PASSWORD not in shown
    assert run(["config", "show", file]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == len(SETTINGS)
    assert PASSWORD not in shown, "management_url is derived from amqp_url"


def test_the_sample_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "sample"]) == 0
    assert "\n#port = 8080\n" in capsys.readouterr().out
