"""Parsing of the command line: the flags of each command, and what it refuses."""

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from popgate.cli import INSTALL_HINT
from popgate.cli.commands import parser, run
from popgate.cli.flags import header, header_filter, number, seconds
from popgate.config.options import SETTINGS
from support.proxy import popgate_command

ROOT = Path(__file__).parents[2]
COMMANDS = [
    *(
        "serve",
        "publish",
        "pop",
        "ack",
        "release",
        "extend",
        "reject",
        "tail",
        "stats",
        "top",
        "explain",
        "peek",
        "cluster",
        "log-level",
        "topics",
        "groups",
    ),
    *(
        "mode",
        "lease-groups",
        "dead-letters",
        "purge",
        "locks",
        "replicas",
        "backup",
        "restore",
        "keys",
        "secrets",
        "config",
        "doctor",
        "prove",
        "completion",
    ),
]
ACTIONS = [
    *("topics create", "topics delete", "groups create", "groups policy", "groups delete"),
    *("lease-groups list", "lease-groups ack", "lease-groups extend", "lease-groups release"),
    *("replicas status", "replicas plan", "replicas apply", "replicas watch"),
    "prove locks",
    *("keys add", "keys list", "keys rotate", "keys revoke"),
    *("secrets new", "secrets add", "secrets promote", "secrets drop", "secrets list"),
    *("config check", "config show", "config sample"),
    *("dead-letters list", "dead-letters show", "dead-letters redrive", "dead-letters purge"),
    *("locks set", "locks acquire", "locks release", "locks delete"),
]
WHAT_A_PLAIN_INSTALL_BRINGS = ("httpx", "httpcore", "h11", "anyio", "certifi", "idna", "typing_extensions")
BROUGHT_BY_SOME_VERSIONS = ("sniffio",)


def parsed(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(arguments)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the standard error of wrong usage; the exit code is 2."""
    try:
        code: object = run(arguments)
    except SystemExit as ended:  # argparse's way
        code = ended.code
    assert code == 2
    return capsys.readouterr().err


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as raised:
        parser().parse_args([*command, "--help"])
    assert raised.value.code == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------- help


def test_the_help_has_one_line_for_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = help_of(capsys).splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("    ") and not line.startswith("     ")]
    assert listed == COMMANDS


@pytest.mark.parametrize("command", [*COMMANDS, *ACTIONS])
def test_the_help_of_each_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"popgate {command}" in help_of(capsys, *command.split()).partition("examples:\n")[2]


@pytest.mark.parametrize("command", [*COMMANDS, *ACTIONS])
def test_every_example_in_the_help_is_a_valid_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = help_of(capsys, *command.split()).partition("examples:\n")[2]
    for line in examples.splitlines():
        words = shlex.split(line, comments=True)
        while "popgate" in words:
            words = words[words.index("popgate") + 1 :]
            ends = [at for at, word in enumerate(words) if word in ("|", "<", ">")]
            parsed(*words[: ends[0] if ends else None])


def test_the_help_of_serve_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "serve")
    for setting in SETTINGS:
        assert setting.flag in text


# ---------------------------------------------------------------- parsing


def test_common_flags_may_stand_before_or_after_the_action() -> None:
    assert parsed("topics", "--url", "http://a", "list").url == "http://a"
    assert parsed("topics", "list", "--url", "http://a").url == "http://a"
    assert "url" not in parsed("topics", "list")


def test_the_group_of_pop_is_default_where_none_is_named() -> None:
    assert parsed("pop", "orders").group == "default"
    assert parsed("pop", "orders", "billing").group == "billing"


def test_a_body_that_begins_with_a_dash_comes_after_two_dashes() -> None:
    assert parsed("publish", "orders", "--", "-1", "--whole").bodies == ["-1", "--whole"]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("publish ct --ordering-key k hello", {"topic": "ct", "bodies": ["hello"], "ordering_key": "k"}),
        ("publish --header a=1 ct one --header b=2 two", {"topic": "ct", "bodies": ["one", "two"]}),
        ("publish ct --ordering-key k -- -hello --whole", {"bodies": ["-hello", "--whole"], "whole": False}),
        ("pop ct --max-messages 1 billing", {"topic": "ct", "group": "billing", "max_messages": 1}),
        ("pop --ack ct", {"topic": "ct", "group": "default", "ack": True}),
        ("release ct g --delay-seconds 5 HANDLE", {"group": "g", "handles": ["HANDLE"], "delay_seconds": 5.0}),
        (
            "extend ct --invisibility-seconds 60 g h1 h2",
            {"group": "g", "handles": ["h1", "h2"], "invisibility_seconds": 60.0},
        ),
        ("stats ct --output json g", {"topic": "ct", "group": "g", "output": "json"}),
        ("topics --url http://a create --queues 2 ct", {"url": "http://a", "topic": "ct", "queues": 2}),
    ],
)
def test_flags_may_stand_between_the_other_arguments(line: str, wanted: dict[str, object]) -> None:
    found = vars(parsed(*line.split()))
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("locks acquire nightly --exec ls -l", ["ls", "-l"]),
        ("locks acquire --ttl-seconds 5 nightly --exec ls --url x --", ["ls", "--url", "x", "--"]),
        ("locks acquire nightly --exec git log -- --exec", ["git", "log", "--", "--exec"]),
        ("locks acquire nightly --exec -- ls", ["--", "ls"]),
        ("locks acquire nightly --exec", []),
    ],
)
def test_all_that_follows_exec_is_the_commands(line: str, command: list[str]) -> None:
    found = parsed(*line.split())
    assert (found.name, found.command) == ("nightly", command)
    assert "url" not in found


def test_headers_add_up_and_may_hold_equals_signs() -> None:
    headers: list[tuple[str, str]] = parsed("publish", "t", "--header", "a=1", "--header", "b=x=y").headers
    assert headers == [("a", "1"), ("b", "x=y")]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["pop"],
        ["pop", "t", "--max-messages", "0"],
        ["pop", "t", "--max-messages", "many"],
        ["pop", "t", "--wait-seconds", "-1"],
        ["pop", "t", "--invisibility-seconds", "43201"],
        ["pop", "t", "--output", "xml"],
        ["pop", "t", "--time", "1"],
        ["pop", "t", "--max-messages", "1", "g", "h"],
        ["pop", "--max-messages", "1"],
        ["pop", "t", "--filter", "novalue"],
        ["pop", "t", "--filter-json", "retries=1"],
        ["lease-groups"],
        ["lease-groups", "t", "g"],
        ["lease-groups", "ack", "t", "g", "s"],
        ["lease-groups", "ack", "t", "g", "s", "--through-epoch", "-1"],
        ["lease-groups", "extend", "t", "g", "s"],
        ["lease-groups", "release", "t", "g", "s"],
        ["lease-groups", "release", "t", "g", "s", "--after-epoch", "-2"],
        ["serve", "--port", "abc"],
        ["serve", "--por", "1"],
        ["serve", "--prot", "1"],
        ["ack", "t"],
        ["extend", "t", "g", "handle"],
        ["publish", "t", "--whole", "--json-lines"],
        ["publish", "t", "body", "--whole"],
        ["publish", "t", "one", "two", "--message-id", "x"],
        ["publish", "t", "--message-id", "x"],
        ["publish", "t", "body", "--header", "novalue"],
        ["topics", "create", "t"],
        ["topics", "create", "t", "--queues", "0"],
        ["topics", "create", "t", "--queues", "1", "--adopt", "q"],
        ["topics", "create", "t", "--queues", "1", "--unique-message-ids"],
        ["topics", "delete", "t"],
        ["groups"],
        ["groups", "list"],
        ["groups", "create", "t", "g", "--max-deliveries", "no"],
        ["groups", "delete", "t", "g"],
        ["stats", "--interval-seconds", "0"],
        ["pop", "t", "--url", "127.0.0.1:8080"],
        ["pop", "t", "--url", "http://127.0.0.1:port"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_and_nothing_is_asked_of_a_server(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *arguments)
    assert "popgate" in said
    assert "Traceback" not in said


def test_an_unknown_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--prot 1 --frob" in refusal(capsys, "serve", "--prot", "1", "--frob")


def test_an_argument_too_many_is_an_error_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "topics", "delete", "a", "b", "--yes")
    assert said.endswith("popgate topics delete: error: unrecognized arguments: b\nsee: popgate topics delete --help\n")


def test_what_loses_messages_wants_a_yes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--yes" in refusal(capsys, "topics", "delete", "orders")
    assert "--yes" in refusal(capsys, "groups", "delete", "orders", "billing")


@pytest.mark.parametrize("text", ["nan", "inf", "-0.1", "10.1", "x", ""])
def test_seconds_are_refused_outside_their_limits(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be seconds from 0 to 10"):
        seconds(0, 10)(text)
    assert seconds(0, 10)("2.5") == 2.5


@pytest.mark.parametrize("text", ["1.0", "0", "x", ""])
def test_whole_numbers_are_refused_outside_their_limits(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number of at least 1"):
        number(1)(text)


@pytest.mark.parametrize("text", ["novalue", "=value", ""])
def test_a_header_has_a_name_and_a_value(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="name=value"):
        header(text)
    assert header("empty=") == ("empty", "")


@pytest.mark.parametrize("text", ["", "{", "kind=express", "[1]", "null", '{"a":NaN}', "[" * 100_000])
def test_a_filter_is_a_json_object(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        header_filter(text)


def test_the_values_of_a_filter_keep_their_kinds() -> None:
    assert header_filter('{"a": [0, "0", 0.5], "b": true, "c": null}') == {"a": [0, "0", 0.5], "b": [True], "c": [None]}


# ---------------------------------------------------------------- the program


@pytest.mark.parametrize("program", [popgate_command(), [str(Path(sys.executable).with_name("popgate"))]])
def test_it_runs_as_a_module_and_as_a_program(program: list[str]) -> None:
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("popgate ")


@pytest.mark.parametrize("arguments", [["serve"], ["pop", "orders"], []], ids=" ".join)
def test_without_the_extra_it_says_in_one_line_what_to_install(arguments: list[str], tmp_path: Path) -> None:
    optional = [name for name in BROUGHT_BY_SOME_VERSIONS if importlib.util.find_spec(name) is not None]
    for name in (*WHAT_A_PLAIN_INSTALL_BRINGS, *optional):
        place = importlib.util.find_spec(name)
        assert place is not None
        assert place.origin is not None
        origin = Path(place.origin)
        origin = origin.parent if origin.name == "__init__.py" else origin
        (tmp_path / origin.name).symlink_to(origin)
    path = [str(tmp_path), str(ROOT / "proxy"), str(ROOT / "clients/python")]
    program = (
        f"import sys; sys.path[:0] = {path!r}; import popgate_client; from popgate.cli import main; sys.exit(main())"
    )
    # -S: without the packages that are installed here.
    command = [sys.executable, "-I", "-S", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{INSTALL_HINT}\n")


def test_a_proxy_loads_neither_the_client_nor_rabbitmqs_library_before_it_needs_them() -> None:
    program = "import sys, popgate.bootstrap; from popgate.cli.commands import parser; parser(serve_only=True);"
    program += "print({'httpx', 'popgate_client', 'aio_pika', 'aiormq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---------------------------------------------------------------- replicas


@pytest.mark.parametrize("action", ["status", "plan", "apply", "watch"])
def test_the_flags_that_complaints_about_replicas_name_are_taken(
    action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``popgate replicas`` names the flag --policies; the settings, and popgate serve, --replica-policies."""
    monkeypatch.setenv("POPGATE_AMQP_URL", "amqp://127.0.0.1:1/")
    for flag in ("--policies", "--replica-policies"):
        assert "--replica-policies: must be PATTERN=NUMBER" in refusal(capsys, "replicas", action, flag, "odd")
    assert "--replica-policies" not in help_of(capsys, "replicas", action)
