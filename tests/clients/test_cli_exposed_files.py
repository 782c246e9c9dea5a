"""Files with credentials that other users of the machine can read: popgate warns at its start, and names the remedy."""

from pathlib import Path

import pytest

from popgate.runtime.private_files import replace_private
from support.command_line import CommandLine
from support.proxy import ProxyProcess

WARNING = "other users can read credentials"
SECRET = "hunter2-0123456789-0123456789-0123"


def configuration(folder: Path, text: str, mode: int) -> Path:
    file = folder / "popgate.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def warnings(folder: Path, *flags: str) -> list[str]:
    """Start and stop a proxy, and return its warnings about files."""
    with ProxyProcess(folder, *flags) as proxy:
        proxy.stop()
        assert "hunter2" not in proxy.output
        return [line for line in proxy.output.splitlines() if WARNING in line]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o666])
def test_a_configuration_file_with_a_secret_that_others_can_read_is_named_with_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    file = configuration(tmp_path, f'secret = "{SECRET}"\n', mode)
    (warning,) = warnings(tmp_path, "--config", str(file), "--log-level", "error")
    assert " ERROR " in warning
    assert f"chmod 600 {file}" in warning
    assert "sets secret" in warning


@pytest.mark.parametrize(("text", "mode"), [(f'secret = "{SECRET}"\n', 0o600), ('log_level = "info"\n', 0o644)])
def test_a_private_file_and_a_file_without_credentials_are_right(tmp_path: Path, text: str, mode: int) -> None:
    assert warnings(tmp_path, "--config", str(configuration(tmp_path, text, mode))) == []


def test_a_command_that_is_no_proxy_warns_too(tmp_path: Path) -> None:
    text = 'amqp_url = "amqp://user:hunter2@127.0.0.1:1/"\n'
    command = CommandLine("http://127.0.0.1:1")
    for mode, count in ((0o644, 1), (0o600, 0)):
        file = configuration(tmp_path, text, mode)
        done = command("replicas", "status", "--config", str(file))
        assert (done.code, done.err.count(f"chmod 600 {file}")) == (3, count)
        assert "hunter2" not in done.err


def test_a_data_folder_and_a_secret_in_it_that_others_can_read_are_named_with_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    assert warnings(tmp_path) == []
    secret = folder / "secret"
    secret.chmod(0o666)
    (warning,) = warnings(tmp_path)
    assert f"chmod 600 {secret}" in warning
    folder.chmod(0o777)
    of_folder, of_secret = warnings(tmp_path)
    assert f"chmod 700 {folder}" in of_folder
    assert f"chmod 600 {secret}" in of_secret


def test_the_secret_of_the_data_folder_does_not_count_if_another_one_is_given(tmp_path: Path) -> None:
    assert warnings(tmp_path) == []
    (tmp_path / "data" / "secret").chmod(0o644)
    assert len(warnings(tmp_path)) == 1
    given = tmp_path / "given"
    replace_private(given, SECRET.encode())
    assert warnings(tmp_path, "--secret-file", str(given)) == []
