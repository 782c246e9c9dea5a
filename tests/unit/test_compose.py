"""The compose file, as far as it can be checked without Docker: its commands are popgate's, and its names match."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from cryptography import x509

from popgate.cli.commands import parser
from popgate.config import ServeOptions, serve_options
from popgate.config.options import SETTINGS
from popgate.domain.errors import StartupError
from popgate_spark.cli import parser as pipeline_parser
from support.rabbitmq_releases import NEWEST

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROXIES = [name for name in SERVICES if name.startswith("popgate")]
NODES = [name for name in SERVICES if name.startswith("rabbitmq")]


SCRIPT = ROOT / "deploy" / "compose-credentials.sh"
INSIDE = "/credentials"
SERVICES_WITH_CREDENTIALS = ("popgate", "rabbitmq", "redis")


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the service `security` creates, in a folder for each volume. It gives nothing to another user here."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("credentials")
    for name in SERVICES_WITH_CREDENTIALS:
        (folder / name).mkdir()
    chown = tmp_path_factory.mktemp("programs") / "chown"
    chown.write_text("#!/bin/sh\n")
    chown.chmod(0o755)
    create_credentials(folder, chown.parent)
    before = contents(folder)
    create_credentials(folder, chown.parent)
    assert contents(folder) == before, "a second start changes nothing"
    return folder


def create_credentials(folder: Path, programs: Path) -> None:
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(["sh", SCRIPT, folder], check=True, env={"PATH": path}, capture_output=True, timeout=60)


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.glob("*/*")}


def image_environment() -> dict[str, str]:
    """Return popgate's settings in the environment of the image."""
    return dict(re.findall(r"\b(POPGATE_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))


def options_of(proxy: str, credentials: Path) -> ServeOptions:
    place = str(credentials / "popgate")
    command = [word.replace(INSIDE, place) for word in SERVICES[proxy]["command"]]
    given = {name: value.replace(INSIDE, place) for name, value in SERVICES[proxy]["environment"].items()}
    parsed = vars(parser().parse_args(command))
    flags = {one.name: parsed[one.name] for one in SETTINGS if parsed[one.name] is not None}
    return serve_options(flags, {**image_environment(), **given}, None)


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxys_command_is_understood(name: str, credentials: Path) -> None:
    options = options_of(name, credentials)
    nodes = [urlsplit(url).hostname for url in options.amqp_urls]
    assert sorted(map(str, nodes)) == NODES
    redis = urlsplit(str(options.redis_url))
    assert (redis.scheme, redis.hostname, redis.port, redis.username, redis.path) == (
        "redis",
        "redis",
        6379,
        "popgate",
        "/0",
    )
    assert options.host == "0.0.0.0"  # inside of a container
    assert str(options.data_dir) == "/data"
    assert options.journal == "/journal"


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_has_keys_tls_and_the_clusters_secret(name: str, credentials: Path) -> None:
    options = options_of(name, credentials)
    assert options.has_authentication
    assert options.has_tls
    assert not options.insecure
    assert options.secrets == ((credentials / "popgate" / "secret").read_bytes().strip(),)
    assert f"popgate-credentials:{INSIDE}:ro" in SERVICES[name]["volumes"]


def test_without_keys_and_tls_the_image_does_not_start() -> None:
    with pytest.raises(StartupError) as refused:
        serve_options({}, image_environment(), None)
    assert "--keys-file" in refused.value.detail
    assert "--tls-certificate-file" in refused.value.detail
    assert refused.value.detail.count("\n") == 1, "a heading and one line"


def test_the_administrators_key_is_one_of_the_keys_file(credentials: Path) -> None:
    key = (credentials / "popgate" / "administrator-key").read_text().strip()
    principals = tomllib.loads((credentials / "popgate" / "keys.toml").read_text())["principals"]
    hashes = [one["sha256"] for one in principals["administrator"]["keys"].values()]
    assert hashes == [hashlib.sha256(key.encode()).hexdigest()]


def test_the_certificate_names_the_addresses_that_clients_use(credentials: Path) -> None:
    certificate = x509.load_pem_x509_certificate((credentials / "popgate" / "tls.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"localhost", "balancer", *PROXIES}
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    cli = SERVICES["cli"]
    assert urlsplit(str(cli["environment"]["POPGATE_URL"])).hostname == "balancer"
    for variable, file in (("POPGATE_TOKEN_FILE", "administrator-key"), ("SSL_CERT_FILE", "tls.crt")):
        assert cli["environment"][variable] == f"{INSIDE}/{file}"


def test_redis_and_popgate_know_the_same_password_and_the_rights_are_the_documented_ones(credentials: Path) -> None:
    password = urlsplit((credentials / "popgate" / "redis-url").read_text().strip()).password
    assert password is not None
    anyone, popgate = (line.split() for line in (credentials / "redis" / "users.acl").read_text().splitlines())
    assert anyone[-2:] == ["-@all", "+ping"]
    assert f"#{hashlib.sha256(password.encode()).hexdigest()}" in popgate
    documented = (ROOT / "docs" / "security.md").read_text().partition("ACL SETUSER popgate")[2].partition("```")[0]
    rights = re.findall(r"\+\S+", documented)
    assert rights
    assert {word for word in popgate if word.startswith("+")} == {*rights, "+config|get"}
    assert {"~popgate:default:*", "&popgate:default:*"} <= set(popgate)


def test_each_service_reads_its_own_credentials_only() -> None:
    mounted = {volume.split(":")[0]: volume.split(":")[1] for volume in SERVICES["security"]["volumes"]}
    assert mounted == {f"{one}-credentials": f"{INSIDE}/{one}" for one in SERVICES_WITH_CREDENTIALS}
    for name, service in SERVICES.items():
        seen = {volume.split(":")[0] for volume in service.get("volumes", ()) if "-credentials:" in volume}
        if name == "security":
            continue
        kind = next((kind for kind in SERVICES_WITH_CREDENTIALS if name.startswith(kind)), None)
        kind = "popgate" if name == "cli" else kind
        assert seen == ({f"{kind}-credentials"} if kind else set())
        if kind and name != "cli":
            assert service["depends_on"]["security"] == {"condition": "service_completed_successfully"}


def test_nothing_secret_is_written_into_the_compose_file() -> None:
    for service in SERVICES.values():
        environment = service.get("environment", {})
        assert not [name for name in environment if re.search(r"PASS|COOKIE|SECRET$|TOKEN$|_KEY$", name)]
    assert not re.search(r"://[^\s/@]+:[^\s/@]+@", (ROOT / "docker-compose.yml").read_text()), "a password in a URL"


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxys_replica_keeper_may_ask_every_node(name: str, credentials: Path) -> None:
    options = options_of(name, credentials)
    assert options.replica_keeper
    assert options.min_replicas <= len(NODES)
    urls = [urlsplit(url) for url in options.management_urls]
    assert sorted((url.hostname, url.port) for url in urls) == [(node, 15_672) for node in NODES]
    password = (credentials / "rabbitmq" / "password").read_text().strip()
    for node in NODES:
        assert SERVICES[node]["image"].partition("@")[0].endswith("-management"), (
            "its API is asked: a proxy's image has no tools"
        )
        user = SERVICES[node]["environment"]["RABBITMQ_DEFAULT_USER"]
        assert {(url.username, url.password) for url in urls} == {(user, password)}


def test_rabbitmq_is_of_the_release_that_the_tests_run_on() -> None:
    images = {SERVICES[name]["image"].partition("@")[0] for name in NODES}
    assert images == {f"rabbitmq:{NEWEST}-management"}


def test_no_two_proxies_prefer_the_same_node(credentials: Path) -> None:
    assert len({options_of(name, credentials).amqp_urls[0] for name in PROXIES}) == len(PROXIES)


def test_the_audit_reads_the_proxies_journal_on_the_cluster_that_is_there() -> None:
    script = SERVICES["audit"]["command"][-1]
    line = next(line for line in script.splitlines() if "popgate-pipeline" in line)
    words = shlex.split(line.partition("||")[0])
    parsed = pipeline_parser().parse_args(words[1:])
    assert (parsed.job, parsed.journal) == ("audit", "/journal")
    assert parsed.state.startswith("/reports/")
    assert parsed.master == SERVICES["spark-worker"]["command"][-1] == "spark://spark-master:7077"
    assert dict(parsed.conf)["spark.driver.host"] == SERVICES["audit"]["hostname"]
    for name in ("spark-worker", "audit", *PROXIES):
        assert "journal:/journal" in SERVICES[name]["volumes"]


def test_what_is_referred_to_is_there() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        assert {one["source"] for one in service.get("configs", ())} <= set(COMPOSE["configs"])
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in COMPOSE["volumes"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is open to the network"
    for config in COMPOSE["configs"].values():
        assert "content" in config or (ROOT / config["file"]).is_file()


def test_the_image_is_built_from_files_that_docker_may_read() -> None:
    """Docker reads what `.dockerignore` does not leave out, so a missing exception is a failed build."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?:--chmod=\d+ )?(?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert any(source == one or source.startswith(f"{one}/") for one in allowed), source


def test_every_node_and_every_proxy_is_known_to_its_neighbours() -> None:
    nodes = COMPOSE["configs"]["rabbitmq"]["content"]
    backends = COMPOSE["configs"]["haproxy"]["content"]
    for name, service in SERVICES.items():
        if "rabbitmq" in name:
            assert service["hostname"] == name
            assert f"rabbit@{name}\n" in nodes
        if name in PROXIES:
            assert f"server {name} {name}:8080\n" in backends
