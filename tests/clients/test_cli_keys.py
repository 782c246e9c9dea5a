"""`popgate keys`: adds, lists, rotates and revokes keys in a file, without a proxy."""

import re
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from popgate.auth.key_file import FILE_BYTES_MAX, KnownPrincipal, parse_key_file
from popgate.auth.watched_keys import WatchedKeys
from support.command_line import CommandLine, Done

KEY = re.compile(r"pg_[a-z2-7]{10}_[A-Za-z0-9_-]{43}\n")
DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
WORKER = ("--role", "worker", "--topics", "orders.*,returns", "--groups", "billing")


class Keys:
    """The commands on one file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.command = CommandLine("http://127.0.0.1:1", may_fork=True)
        self.command.environment["POPGATE_KEYS_FILE"] = str(file)

    def __call__(self, *arguments: str) -> Done:
        return self.command("keys", *arguments)

    def add(self, *arguments: str) -> str:
        """Add a key, and return it."""
        done = self("add", *arguments)
        assert done.code == 0, done.err
        assert KEY.fullmatch(done.out)
        return done.out.strip()

    @property
    def known(self) -> tuple[KnownPrincipal, ...]:
        return parse_key_file(self.file.read_bytes())

    def principal_of(self, key: str) -> str | None:
        keys = WatchedKeys(self.file)
        keys.load()
        caller = keys.caller_by_key(key)
        return None if caller is None else caller.principal.name


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.toml")


def id_of(key: str) -> str:
    return key.split("_")[1]


# ---------------------------------------------------------------- adding


def test_a_key_is_printed_once_and_the_file_has_its_hash_only(keys: Keys) -> None:
    done = keys("add", "orders-app", *WORKER, "--note", "the 'shop'")
    assert (done.code, KEY.fullmatch(done.out) is not None) == (0, True)
    key = done.out.strip()
    assert keys.principal_of(key) == "orders-app"
    assert keys.file.stat().st_mode & 0o777 == 0o600
    assert key.split("_", 2)[2] not in keys.file.read_text()
    assert key not in done.err
    assert f"start the proxies with --keys-file {keys.file}" in done.err
    assert "running proxies read the file within a second" in done.err
    (known,) = keys.known
    assert known.keys[0].note == "the 'shop'"
    assert known.principal.grants[0].topics == ("orders.*", "returns")


def test_json_has_the_key_with_its_id_and_expiry(keys: Keys) -> None:
    (row,) = keys("add", "app", "--role", "consumer", "--expires", "90d", "--output", "json").rows
    assert row["id"] == id_of(row["key"])
    assert row["principal"] == "app"
    assert abs(datetime.fromisoformat(row["expires"]).timestamp() - time.time() - 90 * 86_400) < 60
    assert keys.principal_of(row["key"]) == "app"


def test_a_known_principal_gets_another_key_and_keeps_its_permissions(keys: Keys) -> None:
    first, second = keys.add("app", *WORKER), keys.add("app")
    assert keys.principal_of(first) == keys.principal_of(second) == "app"
    before = keys.file.read_bytes()
    done = keys("add", "app", "--role", "administrator")
    assert (done.code, done.out) == (2, "")
    assert "leave out the role and the patterns" in done.err
    assert keys.file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["app"], 2, "app is new: give it a --role (publisher, consumer"),
        (["app", "--role", "konsumer"], 2, "not 'konsumer'"),
        (["a b", "--role", "consumer"], 2, "NAME must be 1 to 64 of"),
        (["pg_abcdefgh23_" + "x" * 43, "--role", "consumer"], 2, "and no key"),
        (["pg_abcdefgh23_" + "x" * 42, "--role", "consumer"], 2, "and no key"),
        (["app", "--role", "consumer", "--expires", "90"], 2, "such as 90d"),
        (["app", "--role", "consumer", "--expires", "0d"], 2, "such as 90d"),
        (["app", "--role", "consumer", "--topics", "a,,b"], 2, "with commas between them"),
        (["app", "--role", "monitor", "--topics", "a"], 1, "topics can't restrict metrics"),
        (["app", "--role", "consumer", "--note", "a" * 300], 1, "note must be a text of 1 to 255"),
        (["app", "--role", "consumer", "--note", "a\nb"], 2, "must be printable"),
        ([], 2, "NAME"),
    ],
)
def test_wrong_usage_creates_no_file(keys: Keys, arguments: list[str], code: int, said: str) -> None:
    done = keys("add", *arguments)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert not keys.file.exists()


def test_two_commands_at_once_lose_no_key(keys: Keys) -> None:
    keys.add("app", *WORKER)
    with ThreadPoolExecutor(4) as threads:
        added = [*threads.map(keys.add, ["app"] * 8)]
    assert {keys.principal_of(key) for key in added} == {"app"}
    assert len(keys.known[0].keys) == 9


def test_no_key_is_added_to_a_file_that_could_not_be_read_again(keys: Keys) -> None:
    key = keys.add("app", *WORKER)
    content = keys.file.read_bytes()
    keys.file.write_bytes(b"#" * (FILE_BYTES_MAX - len(content) - 100) + b"\n" + content)
    done = keys("add", "app")
    assert (done.code, done.out) == (1, "")
    assert f"would be larger than {FILE_BYTES_MAX} bytes" in done.err
    assert keys.principal_of(key) == "app"
    assert keys("revoke", id_of(key)).code == 0


def test_a_key_that_could_not_be_printed_is_named_for_a_revocation(keys: Keys) -> None:
    keys.add("app", *WORKER)
    program = subprocess.list2cmdline(["popgate", "keys", "add", "app"])
    done = keys.command.shell(f"{program} > /dev/full")
    assert done.code == 1
    match = re.search(r"revoke it with: popgate keys revoke ([a-z2-7]+)", done.err)
    assert match is not None
    assert keys("revoke", match[1]).code == 0


@pytest.mark.parametrize("arguments", [["add", "app"], ["rotate", "app"]])
def test_without_standard_output_no_key_is_added(keys: Keys, arguments: list[str]) -> None:
    keys.add("app", *WORKER)
    before = keys.file.read_bytes()
    done = keys.command.shell(f"popgate keys {' '.join(arguments)} >&-")
    assert (done.code, keys.file.read_bytes()) == (1, before)
    assert "standard output is closed" in done.err


@pytest.mark.parametrize(
    "content", ["", "\n", "# the keys of the shop\n", "[principals]\n", "principals = {}\n"], ids=repr
)
def test_the_first_key_can_be_added_to_a_file_without_principals(keys: Keys, content: str) -> None:
    keys.file.write_text(content)
    keys.file.chmod(0o600)
    for arguments in (["list"], ["rotate", "app"], ["revoke", "--principal", "app"]):
        assert "add one with: popgate keys add" in keys(*arguments).err
    assert keys.file.read_text() == content
    key = keys.add("app", *WORKER)
    assert keys.principal_of(key) == "app"
    assert "# the keys of the shop" in keys.file.read_text() or not content.startswith("#")


# ---------------------------------------------------------------- listing


def test_a_list_has_ids_and_states_and_never_a_key_or_a_hash(keys: Keys) -> None:
    valid, ended = keys.add("app", *WORKER), keys.add("app", "--expires", "1s")
    revoked = keys.add("other", "--role", "publisher,monitor")
    assert keys("revoke", id_of(revoked)).code == 0
    digests = [key.digest.hex() for one in keys.known for key in one.keys]
    while time.time() < max(key.expires or 0 for one in keys.known for key in one.keys):
        time.sleep(0.05)
    done = keys("list")
    assert [(row["key"], row["principal"], row["roles"], row["state"]) for row in done.rows] == [
        (id_of(valid), "app", ["worker"], "valid"),
        (id_of(ended), "app", ["worker"], "expired"),
        (None, "other", ["publisher", "monitor"], "no key"),
    ]
    table = keys("list", "--output", "table").out
    assert table.splitlines()[0].split() == ["KEY", "PRINCIPAL", "ROLES", "CREATED", "EXPIRES", "STATE", "NOTE"]
    for secret in (*digests, *(key.split("_", 2)[2] for key in (valid, ended, revoked))):
        assert secret not in done.out + table


# ---------------------------------------------------------------- rotating and revoking


def test_a_rotation_has_no_gap(keys: Keys) -> None:
    old = keys.add("app", *WORKER)
    done = keys("rotate", "app", "--keep-old", "2h")
    assert KEY.fullmatch(done.out)
    assert keys.principal_of(old) == keys.principal_of(done.out.strip()) == "app"
    first, second = keys.known[0].keys
    assert first.expires is not None
    assert abs(first.expires - time.time() - 7_200) < 60
    assert (second.id, second.expires) == (id_of(done.out), None)
    now = keys("rotate", "app", "--keep-old", "0s").out.strip()
    assert keys.principal_of(old) is None
    assert keys.principal_of(now) == "app"


def test_a_revoked_key_is_unknown_and_others_stay(keys: Keys) -> None:
    first, second, other = keys.add("app", *WORKER), keys.add("app"), keys.add("b", "--role", "monitor")
    done = keys("revoke", id_of(first))
    assert (done.code, done.out) == (0, "")
    assert f"revoked {id_of(first)}" in done.err
    assert (keys.principal_of(first), keys.principal_of(second)) == (None, "app")
    third = keys.add("app")
    assert keys("revoke", "--principal", "app").code == 0
    assert {keys.principal_of(key) for key in (first, second, third)} == {None}
    assert keys.principal_of(other) == "b"
    assert "app has no keys" in keys("revoke", "--principal", "app").err


def test_the_whole_key_names_it_for_a_revocation_and_is_not_shown(keys: Keys) -> None:
    key = keys.add("app", *WORKER)
    for _ in range(2):
        done = keys("revoke", key)
        assert id_of(key) in done.err
        assert key not in done.err
    assert keys.principal_of(key) is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["rotate", "none"], 1, "has no principal 'none'; see: popgate keys list"),
        (["revoke", "--principal", "none"], 1, "has no principal 'none'"),
        (["revoke", "abcdef"], 1, "has no key with the id abcdef; see: popgate keys list"),
        (["revoke"], 2, "name the keys by their ids"),
        (["revoke", "abcdef", "--principal", "app"], 2, "name the keys by their ids"),
        (["frobnicate"], 2, "unknown action 'frobnicate'"),
        ([], 2, "ACTION"),
    ],
)
def test_what_is_not_there_is_an_error_with_a_remedy(keys: Keys, arguments: list[str], code: int, said: str) -> None:
    keys.add("app", *WORKER)
    before = keys.file.read_bytes()
    done = keys(*arguments)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert keys.file.read_bytes() == before


# ---------------------------------------------------------------- the file


def test_a_file_must_be_named_and_a_flag_precedes_the_variable(keys: Keys, tmp_path: Path) -> None:
    key = keys.add("app", *WORKER)
    del keys.command.environment["POPGATE_KEYS_FILE"]
    done = keys("list")
    assert (done.code, "--file, or in POPGATE_KEYS_FILE" in done.err) == (2, True)
    keys.command.environment["POPGATE_KEYS_FILE"] = str(tmp_path / "none")
    assert "does not exist" in keys("list").err
    assert keys("list", "--file", str(keys.file)).rows[0]["key"] == id_of(key)


def test_a_file_that_other_users_can_read_is_refused_with_the_remedy(keys: Keys) -> None:
    keys.add("app", *WORKER)
    keys.file.chmod(0o644)
    for arguments in (["list"], ["add", "app"], ["rotate", "app"], ["revoke", "--principal", "app"]):
        done = keys(*arguments)
        assert (done.code, f"chmod 600 {keys.file}" in done.err) == (1, True)


def test_a_wrong_file_is_not_changed_and_all_problems_are_shown(keys: Keys) -> None:
    keys.add("app", *WORKER)
    with keys.file.open("a") as stream:
        stream.write('[principals.b]\nrole = "x"\nfoo = 1\n')
    before = keys.file.read_bytes()
    done = keys("add", "app")
    assert (done.code, done.out) == (1, "")
    assert "principal b: role must be one of" in done.err
    assert "principal b: has no field 'foo'" in done.err
    assert keys.file.read_bytes() == before


def test_comments_and_links_survive_a_change(keys: Keys, tmp_path: Path) -> None:
    target = tmp_path / "real" / "keys.toml"
    target.parent.mkdir()
    keys.file.symlink_to(target)
    keys.add("app", *WORKER)
    target.write_text(target.read_text().replace("role =", "# the role of the shop\nrole ="))
    keys.add("other", "--role", "monitor")
    keys("rotate", "app")
    keys("revoke", "--principal", "other")
    assert keys.file.is_symlink()
    assert "# the role of the shop\n" in target.read_text()
    assert [path.name for path in target.parent.iterdir()] == ["keys.toml"]


def test_a_missing_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    done = Keys(tmp_path / "none" / "keys.toml")("add", "app", *WORKER)
    assert (done.code, done.out) == (1, "")
    assert "create it" in done.err


def test_the_documented_commands_work_one_after_the_other(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = re.findall(r"(?:\(umask 077; )?popgate keys (?:add|rotate|revoke) [^`\n]+", DOCUMENT.read_text())
    assert [command.partition("popgate keys ")[2].split()[0] for command in commands] == ["add", "rotate", "revoke"]
    del keys.command.environment["POPGATE_KEYS_FILE"]
    monkeypatch.chdir(tmp_path)
    key = ""
    for command in commands:
        done = keys.command.shell(command.replace("KEY_ID", id_of(key) if key else ""))
        assert done.code == 0, done.err
        key = done.out.strip() or key or Path("orders-app.key").read_text().strip()
    assert stat.S_IMODE(Path("orders-app.key").stat().st_mode) == 0o600
    assert keys.principal_of(key) is None


# ---------------------------------------------------------------- keys in the wrong place


MISPLACED = (
    "keys rotate KEY",
    "keys revoke --all KEY",
    "keys revoke KEYx",
    "keys add other --role KEY",
    "keys add KEY",
    "keys add app --expires KEY",
    "keys add app --note it:KEY",
    "keys rotate app --note KEY",
    "keys KEY",
    "KEY",
    "stats --url http://KEY",
    "stats --url http://localhost:KEY",
    "stats --url KEY",
    "topics list --timeout KEY",
    "publish --KEY",
    "keys list --file /KEY",
)


def test_a_key_in_the_wrong_place_is_neither_shown_nor_stored(keys: Keys) -> None:
    keys.add("app", *WORKER)
    key = keys.add("app")
    secret = key.split("_", 2)[2].lower()
    for line in MISPLACED:
        done = keys.command(*line.replace("KEY", key).split(" "))
        assert done.code != 0, line
        assert secret not in (done.out + done.err).lower(), line
        assert secret not in keys.file.read_text().lower(), line


def test_a_key_in_a_note_of_an_edited_file_is_not_shown(keys: Keys) -> None:
    keys.add("app", *WORKER, "--note", "remark")
    key = keys.add("app")
    keys.file.write_text(keys.file.read_text().replace("remark", f"it is {key}"))
    for output in ("json", "table"):
        done = keys("list", "--output", output)
        assert done.code == 0
        assert "it is pg_..." in done.out
        assert key not in done.out
