"""``popgate secrets``: what each command does to the file, and what it never prints."""

import os
import subprocess
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from popgate.cli.commands import run
from popgate.config import serve_options
from popgate.domain.derived_keys import key_id
from popgate.domain.errors import StartupError
from popgate.domain.identity import IdentityKeys
from popgate.domain.names import BrokerQueue
from popgate.runtime.private_files import BYTES_MAX
from support.proxy import popgate_command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with one secret."""
    assert run(["secrets", "new", str(tmp_path / "secrets")]) == 0
    return tmp_path / "secrets"


def secrets_of(file: Path) -> tuple[bytes, ...]:
    return serve_options({"secret_file": str(file)}, {}, None).secrets


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert run(["secrets", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def test_a_new_file_has_one_secret_of_256_bits_for_its_owner_only(file: Path) -> None:
    (secret,) = secrets_of(file)
    assert len(bytes.fromhex(secret.decode())) == 32
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_exists_is_not_replaced(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    assert "exists; append a secret with 'popgate secrets add'" in failure(capsys, "new", file)
    assert file.read_bytes() == before


def test_add_promote_and_drop_replace_a_secret_step_by_step(file: Path) -> None:
    (old,) = secrets_of(file)
    assert run(["secrets", "add", str(file)]) == 0
    known, new = secrets_of(file)
    assert (known, new != old) == (old, True)
    assert run(["secrets", "promote", str(file)]) == 0
    assert secrets_of(file) == (new, old)
    assert run(["secrets", "drop", str(file)]) == 0
    assert secrets_of(file) == (new,)
    assert file.stat().st_mode & 0o777 == 0o600


def test_comments_and_other_secrets_stay_where_they_are(file: Path) -> None:
    (first,) = secrets_of(file)
    second, third = b"the second secret", b"the third secret"
    file.write_bytes(b"# ours\n" + first + b"\n\n# later\n" + second + b"\n" + third)
    run(["secrets", "promote", str(file)])
    assert file.read_bytes() == b"# ours\n" + third + b"\n" + first + b"\n\n# later\n" + second + b"\n"


def test_the_last_secret_can_neither_be_dropped_nor_promoted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has only one secret" in failure(capsys, "drop", file)
    assert "has only one secret" in failure(capsys, "promote", file)


def test_there_are_at_most_eight_secrets(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(7):
        assert run(["secrets", "add", str(file)]) == 0
    assert "has 8 secrets already; drop one first" in failure(capsys, "add", file)


def test_no_secret_is_added_to_a_file_that_could_not_be_read_again(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = secrets_of(file)
    file.write_bytes(known[0] + b"\n#" + b"x" * (BYTES_MAX - 100))
    assert "would be larger than" in failure(capsys, "add", file)
    assert secrets_of(file) == known


@pytest.mark.parametrize("action", ["add", "promote", "drop", "list"])
def test_a_file_that_is_absent_damaged_or_public_is_refused(
    action: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not exist" in failure(capsys, action, tmp_path / "absent")
    file.chmod(0o644)
    assert "can be read or changed by other users" in failure(capsys, action, file)
    file.chmod(0o600)
    file.write_text("hunter2")
    said = failure(capsys, action, file)
    assert "line 1 must be at least 16 bytes long" in said
    assert "hunter2" not in said
    assert file.read_text() == "hunter2"


@pytest.mark.parametrize("before", [b"", b"# ours\n"])
def test_a_byte_order_mark_is_refused(before: bytes, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An editor writes one, and another proxy, whose file has none, would have another secret."""
    (secret,) = secrets_of(file)
    file.write_bytes(before + BOM_UTF8 + secret + b"\n")
    for action in ("list", "add"):
        said = failure(capsys, action, file)
        assert f"line {len(before.splitlines()) + 1} must not begin with a byte order mark" in said
        assert secret.decode() not in said
    with pytest.raises(StartupError, match="must not begin with a byte order mark"):
        secrets_of(file)


def test_no_command_prints_a_secret_and_list_prints_ids(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["secrets", "add", str(file)])
    run(["secrets", "promote", str(file)])
    first, second = secrets_of(file)
    assert run(["secrets", "list", str(file), "--output", "json"]) == 0
    out = capsys.readouterr()
    assert out.out.splitlines() == [
        f'{{"id":"{key_id(first).hex()}","signs":true}}',
        f'{{"id":"{key_id(second).hex()}","signs":false}}',
    ]
    run(["secrets", "drop", str(file)])
    out_of_drop = capsys.readouterr()
    for secret in (first, second):
        assert secret.decode() not in out.out + out.err + out_of_drop.out + out_of_drop.err
    tag = IdentityKeys([first]).signer(BrokerQueue("q"))("c")
    assert f":{key_id(first).hex()}:" in tag  # what `list` shows can be found again on messages


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    run(["secrets", "add", str(link)])
    assert link.is_symlink()
    assert len(secrets_of(file)) == 2


def test_two_commands_at_once_both_add_a_secret(file: Path) -> None:
    adding = [subprocess.Popen(popgate_command("secrets", "add", str(file))) for _ in range(2)]
    assert [process.wait(20) for process in adding] == [0, 0]
    assert len(secrets_of(file)) == 3


def test_a_file_in_a_folder_that_is_absent_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path / "absent") in failure(capsys, "new", tmp_path / "absent" / "secrets")
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - nothing at all, also no draft
