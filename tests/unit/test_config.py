"""Configuration: which source wins, and that all errors are reported at once, with the correct form."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from popgate.api.connection_limiter import HttpLimits
from popgate.config import ServeOptions, serve_options
from popgate.config.options import SETTINGS
from popgate.config.values import HostPort
from popgate.domain.errors import StartupError
from popgate.domain.features import ALL_FEATURES, Feature
from popgate.domain.replica_wanted import ReplicaPolicy
from popgate.runtime.logs import LogFormat

SECRET = "0123456789abcdef"


def options(
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> ServeOptions:
    return serve_options(flags or {}, environment or {}, file)


def complaint(
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> str:
    with pytest.raises(StartupError) as raised:
        options(flags, environment, file)
    return raised.value.detail


def toml(folder: Path, text: str) -> Path:
    file = folder / "popgate.toml"
    file.write_text(text)
    return file


# ---------------------------------------------------------------- the sources


def test_without_any_source_it_is_the_embedded_broker_on_the_local_port() -> None:
    chosen = options()
    assert (chosen.host, chosen.port, chosen.amqp_urls) == ("127.0.0.1", 8080, ())
    assert chosen.auto_create is True
    assert chosen.data_dir.is_absolute()


def test_a_flag_wins_over_a_variable_a_variable_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 3001\n")
    variable = {"POPGATE_PORT": "3002"}
    assert options({"port": "3003"}, variable, file).port == 3003
    assert options({}, variable, file).port == 3002
    assert options({}, {}, file).port == 3001
    assert options().port == 8080


def test_each_setting_may_come_from_another_source(tmp_path: Path) -> None:
    chosen = options({"port": "3003"}, {"POPGATE_HOST": "127.0.0.2"}, toml(tmp_path, 'log_level = "debug"'))
    assert (chosen.port, chosen.host, chosen.log_level) == (3003, "127.0.0.2", "debug")


def test_the_file_may_hold_values_of_tomls_own_types(tmp_path: Path) -> None:
    text = "port = 3001\nauto_create = false\nidle_return_seconds = 2.5\nbuffer_bytes_max = 2097152\n"
    chosen = options(file=toml(tmp_path, text))
    assert (chosen.port, chosen.auto_create) == (3001, False)
    assert (chosen.idle_return_seconds, chosen.buffer_bytes_max) == (2.5, 2_097_152)


def test_a_bad_value_is_not_excused_by_a_good_one_of_lower_precedence(tmp_path: Path) -> None:
    assert "--port" in complaint({"port": "many"}, {"POPGATE_PORT": "3002"}, toml(tmp_path, "port = 3001"))


def test_topics_are_created_by_use_on_the_embedded_broker_only_unless_told_otherwise() -> None:
    rabbitmq = {"amqp_url": "amqp://127.0.0.1"}
    assert options(rabbitmq).auto_create is False
    assert options({**rabbitmq, "auto_create": "yes"}).auto_create is True
    assert options({"auto_create": "no"}).auto_create is False


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_proxy_on_a_loopback_address_has_no_name_but_those_it_is_given(host: str) -> None:
    assert options({"host": host}).allowed_hosts == frozenset()
    assert options({"host": host, "allowed_hosts": "localhost,a.localhost"}).allowed_hosts == {
        "localhost",
        "a.localhost",
    }
    for names in ("a", "*", "localhost,a"):
        assert options({"host": host, "allowed_hosts": names, "keys_file": "/k"}).allowed_hosts == {*names.split(",")}


@pytest.mark.parametrize("names", ["popgate.example.org", "*", "localhost,a"])
def test_a_proxy_behind_a_server_for_other_machines_needs_keys(names: str) -> None:
    given = {"host": "127.0.0.1", "allowed_hosts": names}
    assert "allowed_hosts: a server in front lets other machines in: give --keys-file" in complaint(given)
    assert options({**given, "insecure": "true"}).insecure


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "popgate.internal"])
def test_a_proxy_that_other_machines_reach_goes_by_any_name_unless_names_are_given(host: str) -> None:
    assert options({"host": host, "insecure": "true"}).allowed_hosts == {"*"}
    assert options({"host": host, "insecure": "true", "allowed_hosts": "a"}).allowed_hosts == {"a"}


def test_what_clients_may_take_is_limited_by_default() -> None:
    chosen = options()
    assert (chosen.head_bytes_max, chosen.head_fields_max, chosen.path_bytes_max) == (32_768, 100, 8_192)
    assert (chosen.head_seconds, chosen.connection_idle_seconds, chosen.body_bytes_per_second_min) == (10, 75, 1_024)
    assert (chosen.bodies_bytes_max, chosen.connections_max) == (268_435_456, 20_000)
    assert (chosen.parked_pops_max, chosen.parked_pops_per_group_max) == (20_000, 15_000)
    limits = HttpLimits()  # a server's settings without any configuration
    for field in fields(limits):
        assert getattr(limits, field.name) == getattr(chosen, field.name)


def test_every_option_has_its_setting_and_the_other_way_round() -> None:
    derived = {"secrets", "exposed_files"}
    assert {setting.option_name for setting in SETTINGS} == {field.name for field in fields(ServeOptions)} - derived


# ---------------------------------------------------------------- what is wrong


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    said = complaint(
        {"port": "0", "log_level": "loud"},
        {"POPGATE_SECRET": "short", "POPGATE_PROT": "1", "POPGATE_AUTO_CREATE": "perhaps"},
        toml(tmp_path, 'host = ""\nbuffer_bytes_max = "12 parsecs"\ndata-dir = "x"\n'),
    )
    for wrong in (
        "--port: must be a whole number from 1 to 65535, not '0'",
        "--log-level: must be one of debug, info, warning, error, not 'loud'",
        "POPGATE_SECRET: must be at least 16 bytes long",
        "POPGATE_PROT: no such setting; did you mean POPGATE_PORT?",
        "POPGATE_AUTO_CREATE: must be true or false, not 'perhaps'",
        f"host in {tmp_path}/popgate.toml: must be a text",
        f"buffer_bytes_max in {tmp_path}/popgate.toml: must be a size",
        f"data-dir in {tmp_path}/popgate.toml: no such setting; did you mean data_dir?",
    ):
        assert wrong in said
    assert len(said.splitlines()) == 1 + 8


def test_an_unknown_key_that_resembles_nothing_gets_no_suggestion(tmp_path: Path) -> None:
    said = complaint({}, {"POPGATE_XYZZY": "1"}, toml(tmp_path, "qqq = 1"))
    assert "popgate.toml: no such setting\n" in said
    assert said.endswith("POPGATE_XYZZY: no such setting")


def test_a_table_in_the_file_is_an_unknown_key(tmp_path: Path) -> None:
    assert "serve in" in complaint(file=toml(tmp_path, "[serve]\nport = 1\n"))


@pytest.mark.parametrize(
    ("content", "reason"), [("port = ", "is not TOML"), ("a = 1\na = 2", "is not TOML"), (None, "can't be read")]
)
def test_a_file_that_cannot_be_read_is_said_together_with_the_rest(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    file = tmp_path / "absent.toml" if content is None else toml(tmp_path, content)
    said = complaint({"port": "x"}, {}, file)
    assert f"--config {file}: {reason}" in said
    assert "--port" in said


def test_a_file_that_is_not_text_or_is_a_folder_is_said_to_be(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not TOML" in complaint(file=binary)
    assert "can't be read" in complaint(file=tmp_path)


def test_variables_of_the_command_lines_client_side_are_no_mistakes() -> None:
    options(
        {}, {"POPGATE_URL": "http://x", "POPGATE_TOKEN": "t", "POPGATE_CONFIG": "f", "PATH": "/bin", "POPGATE": "1"}
    )


def test_what_kubernetes_sets_for_a_service_named_popgate_is_no_setting() -> None:
    links = {
        "POPGATE_SERVICE_HOST": "10.0.0.7",
        "POPGATE_SERVICE_PORT": "8080",
        "POPGATE_SERVICE_PORT_HTTP": "8080",
        "POPGATE_PORT": "tcp://10.0.0.7:8080",
        "POPGATE_PORT_8080_TCP": "tcp://10.0.0.7:8080",
        "POPGATE_PORT_8080_TCP_PROTO": "tcp",
        "POPGATE_PORT_8080_TCP_PORT": "8080",
        "POPGATE_PORT_8080_TCP_ADDR": "10.0.0.7",
        "POPGATE_REDIS_SERVICE_HOST": "10.0.0.8",
        "POPGATE_REDIS_PORT": "tcp://10.0.0.8:6379",
        "POPGATE_REDIS_PORT_6379_TCP_ADDR": "10.0.0.8",
    }
    assert options({}, links).port == 8080


def test_state_on_redis_needs_rabbitmq() -> None:
    assert "redis_url: needs amqp_url" in complaint({"redis_url": "redis://127.0.0.1"})


def test_a_proxy_that_is_alone_owns_its_queues() -> None:
    assert options().owns_queues is True
    assert "owns_queues: without redis_url" in complaint({"owns_queues": "false"})


def test_several_workers_need_rabbitmq_and_redis() -> None:
    rabbitmq, redis = {"amqp_url": "amqp://127.0.0.1"}, {"redis_url": "redis://127.0.0.1", "secret": SECRET}
    assert options().workers == 1
    for given in ({}, rabbitmq):
        said = complaint({**given, "workers": "2"})
        assert "workers: 2 workers form a cluster" in said
        assert "amqp_url and redis_url" in said
    assert options({**rabbitmq, **redis, "workers": "2"}).workers == 2


def test_a_replica_keeper_needs_rabbitmq_and_finds_its_management_api_beside_it() -> None:
    assert "replica_keeper: needs amqp_url" in complaint({"replica_keeper": "true"})
    chosen = options({"amqp_url": "amqp://u:p%40@a:1/v,amqps://u@[::1]/v,amqp://c/v", "replica_keeper": "true"})
    assert chosen.management_urls == (
        "http://u:p%40@a:15672",
        "https://u@[::1]:15671",
        "http://guest:guest@c:15672",
    )


def test_the_management_api_of_an_amqps_url_has_the_same_authorities() -> None:
    chosen = options({"amqp_url": "amqps://u:p@a/v?cafile=/etc/a%20b.pem&heartbeat=5,amqp://u:p@b/v?cafile=/c"})
    assert chosen.management_urls == ("https://u:p@a:15671/?cafile=%2Fetc%2Fa+b.pem", "http://u:p@b:15672")


def test_a_list_about_replicas_may_be_a_list_in_the_file(tmp_path: Path) -> None:
    chosen = options(file=toml(tmp_path, "replica_policies = ['a=5', 'b*=3']\nreplica_commands = ['ssh a', 'ssh b']"))
    assert chosen.replica_policies == (ReplicaPolicy("a", 5), ReplicaPolicy("b*", 3))
    assert chosen.replica_commands == ("ssh a", "ssh b")


def test_each_worker_has_a_port_for_its_peers() -> None:
    given = {"amqp_url": "amqp://127.0.0.1", "redis_url": "redis://127.0.0.1", "secret": SECRET, "workers": "4"}
    assert options({**given, "peer_address": "10.0.0.7:65532"}).workers == 4
    assert options({**given, "peer_address": "10.0.0.7:0"}).workers == 4
    assert "peer_address: each of the 4 workers" in complaint({**given, "peer_address": "10.0.0.7:65533"})


def test_no_secret_and_no_password_is_repeated_in_a_complaint() -> None:
    said = complaint({"secret": "tooshort", "amqp_url": "http://user:hunter2@host"})
    assert "--secret" in said
    assert "--amqp-url" in said
    assert "tooshort" not in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "value", ["12345678901234567890", '["hunter2"]', "{ a = 'hunter2' }", "1234567.5", "true", '""', "[]", "[1]"]
)
@pytest.mark.parametrize("name", ["secret", "amqp_url", "redis_url"])
def test_not_even_a_credential_of_a_wrong_type_is_repeated(tmp_path: Path, name: str, value: str) -> None:
    said = complaint(file=toml(tmp_path, f"{name} = {value}"))
    assert "hunter2" not in said
    if (name, value) != ("amqp_url", '["hunter2"]'):  # a list of texts is valid there, but these are no URLs
        assert said.endswith(f"{name} in {tmp_path}/popgate.toml: must be a text in quotes, and not empty")


def test_urls_of_several_nodes_may_be_a_list_in_the_file(tmp_path: Path) -> None:
    urls = ("amqp://u:p@a/v", "amqp://u:p@b/v", "amqp://u:p@c/v")
    assert options(file=toml(tmp_path, f"amqp_url = {list(urls)}")).amqp_urls == urls
    for separator in (",", "\\n", " \\n "):
        assert options(file=toml(tmp_path, f'amqp_url = "{separator.join(urls)}"')).amqp_urls == urls


def test_of_several_urls_the_wrong_one_is_named_by_its_place_and_not_shown() -> None:
    nodes = ["amqp://u:hunter2@a/v", "amqp://u:hunter2@b/v"]
    said = complaint({"amqp_url": ",".join([*nodes, "amqp://u:hunter2@c:port/v"])})
    assert "number 3 of 3 is not" in said
    assert "hunter2" not in said
    said = complaint({"amqp_url": ",".join([*nodes, "amqp://u:1/hunter2@c/v"])})  # a password with a bare slash
    assert "number 3 of 3 is not" in said
    assert "hunter2" not in said


# ---------------------------------------------------------------- values

NEEDED = {
    "redis_url": {"amqp_url": "amqp://127.0.0.1", "secret": "0123456789abcdef"},
    "replica_keeper": {"amqp_url": "amqp://127.0.0.1"},
    "allowed_hosts": {"keys_file": "/keys"},
    "tls_certificate_file": {"tls_key_file": "/k"},
    "tls_key_file": {"tls_certificate_file": "/c"},
    "tls_client_ca_file": {"tls_key_file": "/k", "tls_certificate_file": "/c", "keys_file": "/keys"},
    "oidc_issuer": {"oidc_audience": "popgate"},
}
"""What a setting needs beside it."""
CLUSTER = {**NEEDED["redis_url"], "redis_url": "redis://127.0.0.1"}
FILES = ("amqp_url_file", "redis_url_file", "management_url_file", "secret_file")
"""Settings whose files are read at once: a test of their own tries them."""
SWITCHES = (
    "tracing",
    "auto_create",
    "owns_queues",
    "replica_keeper",
    "replica_move_leaders",
    "replica_allow_stall",
    "accept_untagged",
    "insecure",
    "tracing",
)
GOOD = [
    ("host", "::1", "::1"),
    ("allowed_hosts", "Popgate.example.org., b_1", frozenset({"popgate.example.org", "b_1"})),
    ("allowed_hosts", "*", frozenset({"*"})),
    ("connections_max", "1", 1),
    ("connections_max", "1000000", 1_000_000),
    ("connection_idle_seconds", "1", 1.0),
    ("connection_idle_seconds", "3600", 3_600.0),
    ("head_bytes_max", "1KiB", 1_024),
    ("head_bytes_max", "1MiB", 1_048_576),
    ("head_fields_max", "10", 10),
    ("head_fields_max", "10000", 10_000),
    ("path_bytes_max", "512", 512),
    ("path_bytes_max", "1 mib", 1_048_576),
    ("head_seconds", "0.5", 0.5),
    ("head_seconds", "600", 600.0),
    ("body_bytes_per_second_min", "1", 1),
    ("body_bytes_per_second_min", "1073741824", 1_073_741_824),
    ("bodies_bytes_max", "64MiB", 67_108_864),
    ("bodies_bytes_max", "1024GiB", 1_099_511_627_776),
    ("parked_pops_max", "1", 1),
    ("parked_pops_max", "1000000", 1_000_000),
    ("parked_pops_per_group_max", "1", 1),
    ("parked_pops_per_group_max", "1000000", 1_000_000),
    ("port", "1", 1),
    ("port", "65535", 65_535),
    ("data_dir", "/var/lib/popgate", Path("/var/lib/popgate")),
    ("amqp_url", "amqp://guest:guest@127.0.0.1:5672/%2F", ("amqp://guest:guest@127.0.0.1:5672/%2F",)),
    ("amqp_url", "amqps://[::1]/", ("amqps://[::1]/",)),
    ("amqp_url", "amqp://a/v,amqps://b:1/v , amqp://c/v", ("amqp://a/v", "amqps://b:1/v", "amqp://c/v")),
    ("amqp_url", "amqp://a,amqp://b/,amqp://c/%2F", ("amqp://a", "amqp://b/", "amqp://c/%2F")),
    ("amqp_url", "amqp://user:a,b@host/v%2Cw", ("amqp://user:a,b@host/v%2Cw",)),
    ("amqp_heartbeat_seconds", "600", 600),
    ("confirm_timeout_seconds", "1.5", 1.5),
    ("consumer_timeout_seconds", "1", 1.0),
    ("consumer_timeout_seconds", "86400.5", 86_400.5),
    ("auto_create", "On", True),
    ("auto_create", "0", False),
    ("auto_create_queues", "256", 256),
    ("workers", "64", 64),
    ("event_loop", "asyncio", "asyncio"),
    ("buffer_bytes_max", "1MiB", 1 << 20),
    ("buffer_bytes_max", "2 gb", 2 * 10**9),
    ("buffer_bytes_max", "1048576", 1 << 20),
    ("idle_return_seconds", "0.1", 0.1),
    ("dedup_seconds", "3600", 3_600.0),
    ("policy_check_seconds", "0", 0.0),
    ("policy_check_seconds", "86400", 86_400.0),
    ("lease_group_seconds_max", "3600", 3_600.0),
    ("pull_session_seconds", "2.5", 2.5),
    ("topics_max", "1", 1),
    ("topics_max", "100000", 100_000),
    ("groups_per_topic_max", "10000", 10_000),
    ("queues_max", "100000", 100_000),
    ("locks_max", "100000", 100_000),
    ("lease_groups_max", "100000", 100_000),
    ("headers_max", "4096", 4_096),
    ("headers_bytes_max", "1KiB", 1_024),
    ("headers_bytes_max", "65536", 65_536),
    ("filter_bytes_max", "1 mib", 1_048_576),
    ("metrics_groups_max", "10000", 10_000),
    ("metrics_read_seconds", "0.1", 0.1),
    ("redis_url", "rediss://user:password@host:6380/1", "rediss://user:password@host:6380/1"),
    ("redis_url", "redis+sentinel://a,b:26380/master/0", "redis+sentinel://a,b:26380/master/0"),
    ("redis_namespace", "billing-2", "billing-2"),
    ("peer_address", "10.0.0.7:9000", HostPort("10.0.0.7", 9_000)),
    ("peer_address", "proxy-1.internal:0", HostPort("proxy-1.internal", 0)),
    ("peer_address", "[fd00::7]:65535", HostPort("fd00::7", 65_535)),
    ("owns_queues", "no", False),
    ("owns_queues", "true", True),
    ("replica_keeper", "yes", True),
    ("management_url", "http://u:p@a:15672", ("http://u:p@a:15672",)),
    ("management_url", "http://u:a,b@a:1, https://b/rabbit", ("http://u:a,b@a:1", "https://b/rabbit")),
    ("replica_commands", "none", ()),
    ("replica_commands", "local", ("",)),
    ("replica_commands", "ssh -i '~/a key' rabbit-1, ssh rabbit-2", ("ssh -i '~/a key' rabbit-1", "ssh rabbit-2")),
    ("min_replicas", "0", 0),
    (
        "replica_groups_url",
        "http://proxy-1:8080, https://proxy-2/popgate",
        ("http://proxy-1:8080", "https://proxy-2/popgate"),
    ),
    ("replica_policies", "popgate:a:*=5, b=c = 3", (ReplicaPolicy("popgate:a:*", 5), ReplicaPolicy("b=c", 3))),
    ("replica_policies", "", ()),
    ("replica_zones", "rabbit@one=a, rabbit@two = b", (("rabbit@one", "a"), ("rabbit@two", "b"))),
    ("replica_placement", "by-rack", "by-rack"),
    ("replica_check_interval_seconds", "1", 1.0),
    ("replica_recovery_interval_seconds", "0", 0.0),
    ("replica_forget_after_seconds", "86400", 86_400.0),
    ("replica_changes_max", "100", 100),
    ("replica_changes_per_node_max", "1", 1),
    ("replica_stall_messages_max", "0", 0),
    ("replica_move_leaders", "true", True),
    ("replica_allow_stall", "true", True),
    ("secret", "0123456789abcdef", "0123456789abcdef"),
    ("secret", " 0123456789abcdef\r\n", "0123456789abcdef"),
    ("accept_untagged", "yes", True),
    ("keys_file", "/etc/popgate/keys.toml", Path("/etc/popgate/keys.toml")),
    ("tls_certificate_file", "/etc/tls.crt", Path("/etc/tls.crt")),
    ("tls_key_file", "/etc/tls.key", Path("/etc/tls.key")),
    ("tls_client_ca_file", "/etc/ca.crt", Path("/etc/ca.crt")),
    ("insecure", "true", True),
    ("audit_log", "-", "-"),
    ("audit_log", "/var/log/popgate.jsonl", "/var/log/popgate.jsonl"),
    ("oidc_issuer", "https://login.example.org:8443/realms/main/", "https://login.example.org:8443/realms/main/"),
    ("oidc_audience", "popgate", "popgate"),
    ("oidc_jwks_url", "https://login.example.org/keys", "https://login.example.org/keys"),
    ("oidc_ca_file", "/etc/ca.crt", Path("/etc/ca.crt")),
    ("oidc_name_claim", "preferred_username", "preferred_username"),
    ("oidc_name_claim", "https://example.org/name", "https://example.org/name"),
    ("oidc_scopes_claim", "scp", "scp"),
    ("oidc_scope_prefix", "popgate.", "popgate."),
    ("oidc_scope_aliases", "a=read:x write:* , b = read:*/*", (("a", ("read:x", "write:*")), ("b", ("read:*/*",)))),
    ("journal", "s3://key:secret@bucket/journal", "s3://key:secret@bucket/journal"),
    ("journal", "/var/lib/journal", "/var/lib/journal"),
    ("journal_rotate_seconds", "3600", 3_600.0),
    ("journal_rotate_events", "1000", 1_000),
    ("report_folder", "/var/lib/reports", Path("/var/lib/reports")),
    ("features", "pull , locks", frozenset({Feature.PULL, Feature.LOCKS})),
    ("log_level", "WARNING", "warning"),
    ("log_format", "JSON", LogFormat.JSON),
    ("slow_request_seconds", "0.5", 0.5),
    ("slow_request_seconds", 0, 0.0),
    ("tracing", "on", True),
]
BAD = [
    ("host", ""),
    ("allowed_hosts", ""),
    ("allowed_hosts", "a,"),
    ("allowed_hosts", "http://a"),
    ("allowed_hosts", "a:8080"),
    ("allowed_hosts", "*.a"),
    ("connections_max", "0"),
    ("connections_max", "1000001"),
    ("connection_idle_seconds", "0.9"),
    ("connection_idle_seconds", "3601"),
    ("head_bytes_max", "1023"),
    ("head_bytes_max", "1048577"),
    ("head_fields_max", "9"),
    ("head_fields_max", "10001"),
    ("path_bytes_max", "511"),
    ("path_bytes_max", "2MiB"),
    ("head_seconds", "0.4"),
    ("head_seconds", "601"),
    ("body_bytes_per_second_min", "0"),
    ("body_bytes_per_second_min", "1073741825"),
    ("bodies_bytes_max", "63MiB"),
    ("bodies_bytes_max", "1025GiB"),
    ("parked_pops_max", "0"),
    ("parked_pops_max", "1000001"),
    ("parked_pops_per_group_max", "0"),
    ("parked_pops_per_group_max", "1000001"),
    ("port", "-1"),
    ("port", "65536"),
    ("port", "80.0"),
    ("port", ""),
    ("workers", "0"),
    ("workers", "65"),
    ("event_loop", "trio"),
    ("data_dir", ""),
    ("amqp_url", "127.0.0.1:5672"),
    ("amqp_url", "http://127.0.0.1"),
    ("amqp_url", "amqp://"),
    ("amqp_url", "amqp://host:port"),
    ("amqp_url", "amqp://host:99999"),
    ("amqp_url", "amqp://[::1"),
    ("amqp_url", "amqp://a/,"),
    ("amqp_url", ",amqp://a/"),
    ("amqp_url", "amqp://a,b/"),
    ("amqp_url", "amqp://a/v,b:5672/v"),
    ("amqp_url", "amqp://a/v,amqp://b"),
    ("amqp_url", "amqp://a/v,amqp://b/w"),
    ("amqp_url", "amqp://u:1/pass@b/v"),
    ("amqp_url", "amqps://b/v?no_verify_ssl=false"),
    ("amqp_url", "amqps://b/v?no_verify_ssl"),
    ("amqp_url", "amqps://b/v?no_verify_ssl=0&no_verify_ssl="),
    ("redis_url", "u:pass\uff1f@h"),
    ("journal", "s3://key:sec/ret@bucket/x"),
    ("journal", "simplecache::ftp://u:p@host/x"),
    ("amqp_heartbeat_seconds", "0"),
    ("amqp_heartbeat_seconds", "601"),
    ("confirm_timeout_seconds", "0.9"),
    ("consumer_timeout_seconds", "0"),
    ("redis_url", "127.0.0.1:6379"),
    ("redis_url", "http://127.0.0.1"),
    ("redis_url", ""),
    ("redis_namespace", ""),
    ("redis_namespace", "a:b"),
    ("redis_namespace", "n" * 65),
    ("peer_address", "10.0.0.7"),
    ("peer_address", "10.0.0.7:"),
    ("peer_address", ":9000"),
    ("peer_address", "10.0.0.7:65536"),
    ("peer_address", "10.0.0.7:-1"),
    ("peer_address", "fd00::7:9000"),
    ("peer_address", "http://10.0.0.7:9000"),
    ("peer_address", "10.0.0.7:9000/x"),
    ("peer_address", "user@10.0.0.7:9000"),
    ("peer_address", "two words:9000"),
    ("peer_address", "0.0.0.0:9000"),
    ("peer_address", "[::]:9000"),
    ("peer_address", "[::ffff:0.0.0.0]:9000"),
    ("owns_queues", "perhaps"),
    ("consumer_timeout_seconds", "31622401"),
    ("confirm_timeout_seconds", "nan"),
    ("confirm_timeout_seconds", "inf"),
    ("confirm_timeout_seconds", "soon"),
    ("auto_create", "2"),
    ("auto_create", ""),
    ("auto_create_queues", "0"),
    ("auto_create_queues", "257"),
    ("buffer_bytes_max", "1023KiB"),
    ("buffer_bytes_max", "-1MiB"),
    ("buffer_bytes_max", "1.5GiB"),
    ("buffer_bytes_max", "1TiBs"),
    ("idle_return_seconds", "0"),
    ("dedup_seconds", "0.5"),
    ("policy_check_seconds", "-1"),
    ("policy_check_seconds", "86401"),
    ("lease_group_seconds_max", "0.5"),
    ("lease_group_seconds_max", "2592001"),
    ("pull_session_seconds", "0.5"),
    ("topics_max", "0"),
    ("topics_max", "100001"),
    ("groups_per_topic_max", "0"),
    ("groups_per_topic_max", "10001"),
    ("queues_max", "0"),
    ("queues_max", "100001"),
    ("locks_max", "0"),
    ("locks_max", "100001"),
    ("lease_groups_max", "0"),
    ("lease_groups_max", "100001"),
    ("headers_max", "0"),
    ("headers_max", "4097"),
    ("headers_bytes_max", "1023"),
    ("headers_bytes_max", "65537"),
    ("headers_bytes_max", "32 pages"),
    ("filter_bytes_max", "1023"),
    ("filter_bytes_max", "1048577"),
    ("filter_bytes_max", "1GiB"),
    ("metrics_groups_max", "0"),
    ("metrics_groups_max", "10001"),
    ("metrics_read_seconds", "3601"),
    ("pull_session_seconds", "3601"),
    ("dedup_seconds", "3601"),
    ("idle_return_seconds", "86401"),
    ("replica_keeper", "perhaps"),
    ("management_url", "127.0.0.1:15672"),
    ("management_url", "http://a:port"),
    ("management_url", "http://a,b"),
    ("management_url", ""),
    ("replica_commands", ""),
    ("replica_commands", '"unclosed'),
    ("replica_groups_url", "proxy-1:8080"),
    ("min_replicas", "-1"),
    ("min_replicas", "100"),
    ("replica_policies", "orders"),
    ("replica_policies", "=3"),
    ("replica_policies", "orders=many"),
    ("replica_policies", "orders=100"),
    ("replica_policies", "orders=3,orders=5"),
    ("replica_zones", "rabbit@one"),
    ("replica_zones", "rabbit@one="),
    ("replica_zones", "rabbit@one=a,rabbit@one=b"),
    ("replica_placement", "two words"),
    ("replica_check_interval_seconds", "0.5"),
    ("replica_recovery_interval_seconds", "-1"),
    ("replica_forget_after_seconds", "0"),
    ("replica_changes_max", "0"),
    ("replica_changes_per_node_max", "0"),
    ("replica_stall_messages_max", "-1"),
    ("replica_move_leaders", "maybe"),
    ("replica_allow_stall", ""),
    ("secret", "fifteen bytes.."),
    ("secret", "abcdefg" * 9),
    ("accept_untagged", "perhaps"),
    ("secret_file", ""),
    ("amqp_url_file", ""),
    ("redis_url_file", "redis://u:pass@h"),
    ("redis_url_file", ""),
    ("management_url_file", ""),
    ("keys_file", ""),
    ("tls_certificate_file", ""),
    ("tls_key_file", ""),
    ("tls_client_ca_file", ""),
    ("insecure", "perhaps"),
    ("audit_log", ""),
    ("oidc_issuer", "http://login.example.org"),
    ("oidc_issuer", "login.example.org"),
    ("oidc_issuer", "https://"),
    ("oidc_issuer", "https://user:password@login.example.org"),
    ("oidc_issuer", "https://login.example.org:port"),
    ("oidc_issuer", "https://login.example.org/#a"),
    ("oidc_issuer", "https://login.example.org/a b"),
    ("oidc_audience", ""),
    ("oidc_jwks_url", "http://login.example.org/keys"),
    ("oidc_ca_file", ""),
    ("oidc_name_claim", ""),
    ("oidc_name_claim", "two words"),
    ("oidc_scopes_claim", "a,b"),
    ("oidc_scope_prefix", "two words"),
    ("oidc_scope_prefix", "p" * 65),
    ("oidc_scope_prefix", "*"),
    ("oidc_scope_aliases", "a"),
    ("oidc_scope_aliases", "a="),
    ("oidc_scope_aliases", "=b"),
    ("oidc_scope_aliases", "a=b,a=c"),
    ("journal", ""),
    ("journal", "://bucket"),
    ("journal_rotate_seconds", "0.5"),
    ("journal_rotate_events", "0"),
    ("journal_rotate_events", "5000001"),
    ("report_folder", ""),
    ("features", ""),
    ("features", "pull,popp"),
    ("features", "pull,"),
    ("log_level", "verbose"),
    ("log_format", "logfmt"),
    ("slow_request_seconds", "-1"),
    ("tracing", "http://collector:4318"),
]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_a_good_value_becomes_the_option(name: str, text: str, value: object) -> None:
    needed = CLUSTER if name in ("owns_queues", "workers") else NEEDED.get(name, {})
    if name.startswith("oidc_") and name != "oidc_issuer":
        needed = {"oidc_issuer": "https://login.example.org", "oidc_audience": "a"}
    option = next(setting.option_name for setting in SETTINGS if setting.name == name)
    assert getattr(options({**needed, name: text}), option) == value


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_refused_by_name_whatever_source_it_comes_from(name: str, text: str, tmp_path: Path) -> None:
    setting = next(setting for setting in SETTINGS if setting.name == name)
    assert f"{setting.flag}: must be" in complaint({name: text})
    assert f"{setting.variable}: must be" in complaint({}, {setting.variable: text})
    assert f"{name} in {tmp_path}/popgate.toml: must be" in complaint(file=toml(tmp_path, f"{name} = '{text}'"))


@pytest.mark.parametrize("value", ["true", "[1]", "1979-05-27", "{a = 1}"])
@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS if setting.name not in SWITCHES])
def test_a_toml_value_of_a_wrong_type_is_refused(name: str, value: str, tmp_path: Path) -> None:
    assert f"{name} in" in complaint(file=toml(tmp_path, f"{name} = {value}"))


def test_every_setting_is_tried_above() -> None:
    names: set[Any] = {setting.name for setting in SETTINGS}
    assert {name for name, *_ in GOOD} == names - {*FILES}
    assert {name for name, *_ in BAD} == names


def test_a_data_folder_may_be_given_from_home_or_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    assert options({"data_dir": "~/data"}).data_dir == Path("/home/somebody/data")
    assert options({"data_dir": "data"}).data_dir == tmp_path / "data"


def test_a_feature_that_is_unknown_is_refused_with_the_names_of_those_that_are_known(tmp_path: Path) -> None:
    told = complaint({"features": "pull,pops"})
    assert told.endswith(f"--features: must be names of features ({', '.join(ALL_FEATURES)}), not 'pops'")
    assert options(file=toml(tmp_path, 'features = ["pull", "locks"]')).features == {Feature.PULL, Feature.LOCKS}
    assert options().features == set(ALL_FEATURES)


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ("locks,purge", "features: without pop and pull no client could consume"),
        ("pop,consume_mode", "features: consume_mode needs pull; name both, or none"),
        ("pull,lease_groups", "features: lease_groups needs pop; name both, or none"),
    ],
)
def test_a_feature_that_is_nothing_without_another_is_refused_alone(features: str, told: str) -> None:
    assert told in complaint({"features": features})


# ---------------------------------------------------------------- security


def private(folder: Path, name: str, content: str) -> str:
    file = folder / name
    file.write_text(content)
    file.chmod(0o600)
    return str(file)


def test_urls_may_come_from_files(tmp_path: Path) -> None:
    given = {
        "amqp_url_file": private(tmp_path, "amqp", "amqp://u:p@a/v,amqp://u:p@b/v\n"),
        "redis_url_file": private(tmp_path, "redis", "  redis://:p@a/0\n"),
        "management_url_file": private(tmp_path, "management", "http://u:p@a:15672"),
        "secret": SECRET,
    }
    chosen = options(given)
    assert chosen.amqp_urls == ("amqp://u:p@a/v", "amqp://u:p@b/v")
    assert (chosen.redis_url, chosen.management_urls) == ("redis://:p@a/0", ("http://u:p@a:15672",))
    assert chosen.auto_create is False  # as with the URL itself


@pytest.mark.parametrize("name", ["amqp_url", "redis_url", "management_url", "secret"])
def test_a_value_and_a_file_with_it_contradict_each_other(name: str, tmp_path: Path) -> None:
    file = private(tmp_path, "file", "hunter2")
    given = {"secret": SECRET, "amqp_url": "amqp://a", "redis_url": "redis://a", "management_url": "http://a"}
    flag = "--" + name.replace("_", "-")
    said = complaint({**given, f"{name}_file": file})
    assert said.endswith(f"{flag}: {flag}-file names a file with the same setting; give one of them")
    assert f"POPGATE_{name.upper()}: {flag}-file names" in complaint(
        {f"{name}_file": file}, {f"POPGATE_{name.upper()}": given[name]}
    )


@pytest.mark.parametrize("name", ["amqp_url", "redis_url", "management_url"])
@pytest.mark.parametrize("content", ["hunter2", "", "ftp://u:hunter2@a", "amqp://a:hunter2"])
def test_a_wrong_url_in_a_file_is_told_with_the_file_and_not_shown(name: str, content: str, tmp_path: Path) -> None:
    file = private(tmp_path, "file", content)
    said = complaint({f"{name}_file": file})
    assert f"{name.replace('_', '-')}-file: the content of {file} must be" in said
    assert "hunter2" not in said


def test_a_file_that_cannot_be_used_is_told_with_the_rest(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xffhunter2")
    binary.chmod(0o600)
    absent = str(tmp_path / "absent")
    said = complaint({"amqp_url_file": str(binary), "secret_file": absent, "port": "0"})
    assert len(said.splitlines()) == 1 + 3
    assert "hunter2" not in said
    assert f"--secret-file: {absent}" in said
    public = private(tmp_path, "public", "amqp://a")
    Path(public).chmod(0o644)
    assert public in complaint({"amqp_url_file": public})


@pytest.mark.parametrize(
    ("content", "secrets"),
    [
        (f"{SECRET}\n", (SECRET.encode(),)),
        (f"# first\n  {SECRET}  \r\n\n{SECRET}x", (SECRET.encode(), f"{SECRET}x".encode())),
        (f"{SECRET} with spaces", (f"{SECRET} with spaces".encode(),)),
    ],
)
def test_the_secrets_are_the_lines_of_the_file(content: str, secrets: tuple[bytes, ...], tmp_path: Path) -> None:
    assert options({"secret_file": private(tmp_path, "secrets", content)}).secrets == secrets


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "must contain a secret"),
        ("# hunter2 is no secret", "must contain a secret"),
        (f"{SECRET}\n" + "abcdefg" * 9, "line 2 must be a text with at least 8 different characters"),
        (f"{SECRET}\nhunter2", "line 2 must be at least 16 bytes long"),
        (f"{SECRET}\n\n{SECRET}", "lines 1 and 3 must be different secrets"),
        ("".join(f"{SECRET}{number}\n" for number in range(9)), "must contain at most 8 secrets, not 9"),
    ],
)
def test_a_wrong_file_of_secrets_is_told_by_the_line(content: str, told: str, tmp_path: Path) -> None:
    file = private(tmp_path, "secrets", content)
    said = complaint({"secret_file": file})
    assert said.endswith(f"--secret-file: the content of {file} {told}")
    assert "hunter2" not in said


def test_one_secret_is_a_list_of_one_and_none_is_that_of_the_data_folder() -> None:
    assert options({"secret": SECRET}).secrets == (SECRET.encode(),)
    assert options().secrets == ()


def test_a_cluster_needs_a_secret() -> None:
    given = {"amqp_url": "amqp://127.0.0.1", "redis_url": "redis://127.0.0.1"}
    assert complaint(given).endswith(
        "redis_url: a cluster needs a secret that all proxies share: popgate secrets new FILE, then --secret-file FILE"
    )
    options({**given, "secret": SECRET})


TLS_FLAGS = "TLS (--tls-certificate-file, --tls-key-file)"
TLS = {"tls_certificate_file": "/c", "tls_key_file": "/k"}
OIDC = {"oidc_issuer": "https://a", "oidc_audience": "a"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {},
            f"give --keys-file and {TLS_FLAGS}, or --insecure to serve without protection",
        ),
        (
            {"keys_file": "/keys"},
            "give TLS (--tls-certificate-file, --tls-key-file), or --insecure to serve without TLS",
        ),
        (TLS, "give --keys-file, or --insecure to serve without authentication"),
        ({**TLS, "keys_file": "/keys"}, None),
        ({**TLS, **OIDC}, None),
        ({"insecure": "true"}, None),
        ({"keys_file": "/keys", "insecure": "true"}, None),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "popgate.internal", "fd00::7"])
def test_other_machines_reach_no_proxy_without_protection(host: str, given: dict[str, str], told: str | None) -> None:
    if told is None:
        assert options({**given, "host": host}).host == host
    else:
        said = complaint({**given, "host": host})
        assert said.splitlines()[1:] == [f"  host: {host} can be reached from other machines: {told}"]
    options({**given, "host": "127.0.0.1"})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tls_certificate_file": "/c"}, "tls_certificate_file: needs tls_key_file; give both, or none"),
        ({"tls_key_file": "/k"}, "tls_key_file: needs tls_certificate_file; give both, or none"),
        ({"tls_client_ca_file": "/a", "keys_file": "/k"}, "tls_client_ca_file: without TLS no client can show"),
        ({"tls_client_ca_file": "/a", **TLS}, "tls_client_ca_file: a client certificate names a principal"),
        ({"oidc_issuer": "https://a"}, "oidc_issuer: needs oidc_audience"),
        ({"oidc_audience": "a"}, "oidc_audience: has no effect without oidc_issuer"),
        ({"oidc_jwks_url": "https://a"}, "oidc_jwks_url: has no effect without oidc_issuer"),
        ({"oidc_scope_prefix": "popgate."}, "oidc_scope_prefix: has no effect without oidc_issuer"),
        ({"oidc_name_claim": "name"}, "oidc_name_claim: has no effect without oidc_issuer"),
    ],
)
def test_half_of_a_protection_is_refused(given: dict[str, str], told: str) -> None:
    said = complaint(given)
    assert told in said
    assert len(said.splitlines()) == 2


def test_all_contradictions_are_told_at_once() -> None:
    said = complaint(
        {"host": "::", "tls_key_file": "/k", "oidc_audience": "a", "amqp_url": "amqp://a", "redis_url": "redis://a"}
    )
    assert len(said.splitlines()) == 1 + 4


def test_a_command_that_serves_no_clients_needs_neither_a_secret_nor_protection(tmp_path: Path) -> None:
    given = {"host": "0.0.0.0", "redis_url": "redis://a", "secret_file": str(tmp_path / "absent"), "tls_key_file": "/k"}
    given |= {"amqp_url_file": private(tmp_path, "amqp", "amqp://u:p@a/v")}
    chosen = serve_options(given, {}, None, serves=False)
    assert (chosen.amqp_urls, chosen.secrets) == (("amqp://u:p@a/v",), ())


def test_what_may_be_a_credential_is_not_in_the_options_text() -> None:
    hidden = {setting.name for setting in SETTINGS if setting.hidden}
    assert hidden == {"secret", "amqp_url", "redis_url", "management_url", "replica_groups_url", "journal"}
    shown = repr(
        options(
            {
                "secret": "hunter2 of many bytes",
                "amqp_url": "amqp://u:hunter2@a",
                "redis_url": "redis://:hunter2@a",
                "management_url": "http://u:hunter2@a",
                "replica_groups_url": "http://u:hunter2@a",
                "journal": "s3://hunter2:hunter2@a/b",
            }
        )
    )
    assert "hunter2" not in shown
    assert "port=8080" in shown
