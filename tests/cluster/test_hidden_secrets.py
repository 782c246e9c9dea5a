"""No credential appears where others could read it: logs, answers, `ps`, Redis, RabbitMQ, the journal, data folders.

Every credential is distinctive, and given in each possible way: flags, variables, files. The hunt also looks for
encoded forms. A test plants each credential in each place, so that the hunt is known to find it.
"""

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

PROGRAM = (str(Path(sys.executable).with_name("popgate")),)
"""The installed program: it is executed, and not forked from a process with another command line."""
PATIENCE_SECONDS = 30.0
PATHS = (
    *("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/v1", "/v1/admin/topics", "/v1/admin/cluster"),
    *("/v1/admin/replicas", "/v1/locks", "/v1/admin/topics/t", "/v1/topics/t/groups/g", "/nowhere", "/peers"),
    *("/v1/topics/%ff/groups/g/pop", "/v1/admin/topics/t/groups/g/dead-letters", "/v1/topics/none/groups/g"),
)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """All credentials of the deployment. Their letters occur nowhere else."""

    secret: str = "hunter2-cluster-secret-0123456789"
    next_secret: str = "hunter2-next-secret-0123456789"
    own_secret: str = "hunter2-secret-of-one-proxy-012"
    redis: str = "hunter2/redis+p@ss"
    wrong_redis: str = "hunter2/wrong-redis"
    rabbitmq: str = "hunter2/rabbit+p@ss"
    wrong_rabbitmq: str = "hunter2/wrong-rabbit"
    management: str = "hunter2/management"
    key: str = "pg_hunterkey_" + "H" * 43
    wrong_key: str = "pg_hunterbad_" + "W" * 43
    token: str = "eyJhbGciOiJub25lIn0.hunter2-token.x"
    basic: str = "hunter2-basic-password"

    def all(self) -> Mapping[str, str]:
        return dict(vars(self))


def forms(credential: str) -> set[bytes]:
    """Return the texts that reveal a credential."""
    raw = credential.encode()
    encoded = {raw, quote(credential, safe="").encode(), raw.hex().encode()}
    for shift in range(3):  # base64 of a text that contains it at any place
        whole = base64.b64encode(b"x" * shift + raw)
        encoded.add(whole[4 if shift else 0 : -4])
    return encoded


@dataclass
class Hunt:
    """The places in which a credential could appear, and their content."""

    credentials: Credentials
    folders: list[Path] = field(default_factory=list[Path])
    kept: set[Path] = field(default_factory=set[Path])
    """Files in which the operator keeps credentials."""
    answers: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    ask_rabbitmq: Callable[[], bytes] = bytes

    def found(self) -> set[tuple[str, str]]:
        """Return each place in which a credential appears, with the name of the credential."""
        wanted = {(name, form) for name, text in self.credentials.all().items() for form in forms(text)}
        return {
            (place, name)
            for place, content in [*self._files(), *self._processes(), *self.answers, ("rabbitmq", self.ask_rabbitmq())]
            for name, form in wanted
            if form in content
        }

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """Return the names and contents of all files: logs, data folders, the journal, and all that Redis was told."""
        for folder in self.folders:
            for file in folder.rglob("*"):
                yield str(file.relative_to(folder.parent)), str(file).encode()
                if file.is_file() and file not in self.kept:
                    yield str(file.relative_to(folder.parent)), file.read_bytes()

    def _processes(self) -> Iterator[tuple[str, bytes]]:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                yield f"ps {file.parent.name}", file.read_bytes()
            except OSError:  # it has ended
                continue


@dataclass(frozen=True, kw_only=True)
class Deployment:
    hunt: Hunt
    redis: RedisServer
    rabbitmq: RabbitNode
    vhost: str
    proxies: Sequence[ProxyProcess]
    """One with flags and workers, one with variables, one with files, and one alone on its embedded broker."""


def private(folder: Path, name: str, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(content)
    file.chmod(0o600)
    return file


@pytest.fixture
def deployment(tmp_path: Path, redis_server: RedisServer, rabbitmq: RabbitNode) -> Iterator[Deployment]:
    """`redis_server` handles a missing installation; this Redis is the deployment's own."""
    known = Credentials()
    kept = tmp_path / "kept"
    keys_file = private(kept, "keys.toml", _keys(known.key))
    hunt = Hunt(known, folders=[tmp_path / "proxies", tmp_path / "redis", tmp_path / "journal"])
    with RedisServer(tmp_path / "redis") as redis, rabbitmq.own_vhost("hidden") as vhost:
        redis.ask("ACL", "SETUSER", "popgate", "on", f">{known.redis}", "~*", "&*", "+@all")
        _rabbitmq_user(rabbitmq, vhost, known.rabbitmq)
        rabbitmq.api("PUT", "users", f"{vhost}-watch", body={"password": known.management, "tags": "administrator"})
        hunt.ask_rabbitmq = lambda: _told_rabbitmq(rabbitmq, vhost)
        redis_url = redis.url().replace("redis://", f"redis://popgate:{quote(known.redis, safe='')}@")
        amqp_url = rabbitmq.amqp_url(vhost).replace("guest:guest@", f"{vhost}:{quote(known.rabbitmq, safe='')}@")
        management = f"http://{vhost}-watch:{quote(known.management, safe='')}@127.0.0.1:{rabbitmq.management_port}"
        common = ["--redis-namespace", vhost, "--log-level", "debug", "--keys-file", str(keys_file)]
        flags = ["--secret", known.secret, f"--redis-url={redis_url}", "--amqp-url", amqp_url]
        flags += ["--management-url", management, "--journal", str(tmp_path / "journal"), "--workers", "2"]
        names = ("secret", "redis_url", "amqp_url", "management_url")
        values = (f"{known.secret}\n{known.next_secret}\n", redis_url, amqp_url, management)
        files = [
            word
            for name, value in zip(names, values, strict=True)
            for word in (f"--{name.replace('_', '-')}-file", str(private(kept, name, value)))
        ]
        variables = {f"POPGATE_{name.upper()}": value for name, value in zip(names, values, strict=True)}
        variables["POPGATE_SECRET"] = known.secret
        alone = ["--keys-file", str(keys_file), "--log-level", "debug", "--secret", known.own_secret]
        starts: dict[str, tuple[list[str], Mapping[str, str]]] = {
            "flags": ([*common, *flags], {}),
            "variables": (common, variables),
            "files": ([*common, *files], {}),
            "alone": (alone, {}),
        }
        proxies = [
            ProxyProcess(tmp_path / "proxies" / name, *words, environment=environment, name=name, program=PROGRAM)
            for name, (words, environment) in starts.items()
        ]
        try:
            for proxy in proxies:
                proxy.launch()
            for proxy in proxies:
                proxy.wait_ready()
            yield Deployment(hunt=hunt, redis=redis, rabbitmq=rabbitmq, vhost=vhost, proxies=proxies)
        finally:
            for proxy in proxies:
                proxy.close()
            for user in (vhost, f"{vhost}-watch"):
                rabbitmq.api("DELETE", "users", user)


def _keys(key: str) -> str:
    return (
        '[principals.hunted]\nrole = "administrator"\n'
        f'[principals.hunted.keys.hunterkey]\nsha256 = "{sha256(key.encode()).hexdigest()}"\n'
        "created = 2026-11-26T12:00:00Z\n"
    )


def _rabbitmq_user(rabbitmq: RabbitNode, name: str, password: str) -> None:
    """Create a user of the virtual host `name`, or change its password."""
    rabbitmq.api("PUT", "users", name, body={"password": password, "tags": ""})
    rabbitmq.api("PUT", "permissions", name, name, body={"configure": ".*", "write": ".*", "read": ".*"})


def _told_rabbitmq(rabbitmq: RabbitNode, vhost: str) -> bytes:
    """Return what RabbitMQ shows of popgate: names, arguments, and properties of connections."""
    return repr(
        [rabbitmq.api("GET", kind, vhost) for kind in ("queues", "exchanges", "bindings", "consumers")]
        + [rabbitmq.api("GET", "connections")]
    ).encode()


# ---------------------------------------------------------------- use


def use(deployment: Deployment) -> None:
    """Make requests of all kinds, good and bad, with good and bad credentials. Record the answers."""
    for proxy in deployment.proxies:
        for authorization in authorizations(deployment.hunt.credentials):
            headers = {} if authorization is None else {"authorization": authorization}
            for method, path, body in requests():
                ask(deployment.hunt, proxy, method, path, body, headers)


def authorizations(known: Credentials) -> list[str | None]:
    """Return the values of the header: the good one first, and at the end none."""
    basic = base64.b64encode(f"user:{known.basic}".encode()).decode()
    return [f"Bearer {known.key}", f"Bearer {known.wrong_key}", f"Bearer {known.token}", f"Basic {basic}", None]


def requests() -> Iterator[tuple[str, str, object]]:
    yield "PUT", "/v1/admin/topics/t", {"queues": 2}
    yield "PUT", "/v1/admin/topics/t/groups/g", {"max_deliveries": 1}
    yield "POST", "/v1/topics/t/messages", {"messages": [{"body": "b"}]}
    yield "POST", "/v1/topics/t/groups/g/pop", {"wait_seconds": 0}
    yield "POST", "/v1/topics/t/groups/g/ack", {"receipt_handles": ["no handle"]}
    yield "POST", "/v1/topics/t/groups/g/ack", {"nonsense": 1}
    yield "POST", "/v1/topics/t/groups/g/ack", "not an object"
    yield "PUT", "/v1/locks/l", {"kind": "mutex"}
    yield "POST", "/v1/locks/l/verify", {"token": "wrong"}
    for path in PATHS:
        yield "GET", path, None
        yield "DELETE", path + "-not", None


def ask(hunt: Hunt, proxy: ProxyProcess, method: str, path: str, body: object, headers: Mapping[str, str]) -> None:
    try:
        given = proxy.client.request(method, path, json=body, headers=headers)
    except httpx.TransportError:
        return
    head = repr(list(given.headers.items())).encode()
    hunt.answers.append((f"{proxy.name}: {method} {path}", head + given.content))


def failure(folder: Path, *arguments: str) -> None:
    """Start a proxy that can't start."""
    proxy = ProxyProcess(folder, *arguments, name=folder.name, program=PROGRAM)
    proxy.launch()
    assert proxy.wait(PATIENCE_SECONDS) != 0
    proxy.close()
    assert "Traceback" not in proxy.output, proxy.output


def fail_to_start(deployment: Deployment, folder: Path) -> None:
    """Start proxies with wrong passwords, unreachable servers, and contradicting settings."""
    known = deployment.hunt.credentials
    wrong = quote(known.wrong_redis, safe="")
    redis_url = deployment.redis.url().replace("redis://", f"redis://popgate:{wrong}@")
    amqp = deployment.rabbitmq.amqp_url(deployment.vhost)
    amqp_url = amqp.replace("guest:guest@", f"{deployment.vhost}:{quote(known.wrong_rabbitmq, safe='')}@")
    nowhere_amqp = f"amqp://u:{quote(known.rabbitmq, safe='')}@127.0.0.1:1/"
    nowhere_redis = f"redis://:{quote(known.redis, safe='')}@127.0.0.1:1/0"
    secret = ["--secret", known.secret, "--log-level", "debug"]
    failure(folder / "wrong-redis", "--amqp-url", amqp, "--redis-url", redis_url, *secret)
    failure(folder / "no-redis", "--amqp-url", amqp, "--redis-url", nowhere_redis, *secret)
    failure(folder / "wrong-rabbitmq", "--amqp-url", amqp_url, *secret)
    failure(folder / "no-rabbitmq", "--amqp-url", nowhere_amqp, *secret)
    failure(folder / "unquoted", "--amqp-url", f"amqp://u:{known.rabbitmq}@127.0.0.1:1/", *secret)
    unquoted = f"redis://u:{known.redis}@127.0.0.1:1/"
    failure(folder / "unquoted-redis", "--amqp-url", amqp, "--redis-url", unquoted, *secret)
    failure(folder / "twice", *secret, "--secret-file", str(private(folder, "twice-secret", known.next_secret)))
    (folder / "twice-secret").unlink()
    failure(folder / "open", *secret, "--host", "0.0.0.0")


def lose_servers(deployment: Deployment) -> None:
    """Change the passwords of the running deployment, and close its connections: nothing works until it is undone."""
    known, vhost = deployment.hunt.credentials, deployment.vhost
    member = deployment.proxies[1]

    def is_ready() -> bool:
        ask(deployment.hunt, member, "GET", "/readyz", None, {"authorization": f"Bearer {known.key}"})
        return member.client.get("/readyz").is_success

    deployment.redis.ask("ACL", "SETUSER", "popgate", "resetpass", ">other")
    deployment.redis.ask("CLIENT", "KILL", "USER", "popgate")
    wait_until(lambda: not is_ready(), timeout_seconds=PATIENCE_SECONDS, what="the loss of Redis")
    use(deployment)
    deployment.redis.ask("ACL", "SETUSER", "popgate", "resetpass", f">{known.redis}")
    wait_until(is_ready, timeout_seconds=PATIENCE_SECONDS, what="Redis to be usable again")
    _rabbitmq_user(deployment.rabbitmq, vhost, "other")
    deployment.rabbitmq.close_connections(vhost)
    wait_until(lambda: not is_ready(), timeout_seconds=PATIENCE_SECONDS, what="the loss of RabbitMQ")
    use(deployment)
    _rabbitmq_user(deployment.rabbitmq, vhost, known.rabbitmq)
    wait_until(is_ready, timeout_seconds=PATIENCE_SECONDS, what="RabbitMQ to be usable again")


# ---------------------------------------------------------------- the hunt


def test_no_credential_is_found_anywhere(deployment: Deployment, tmp_path: Path) -> None:
    use(deployment)
    assert deployment.hunt.found() == set()
    lose_servers(deployment)
    fail_to_start(deployment, tmp_path / "proxies")
    use(deployment)
    for proxy in deployment.proxies:
        assert proxy.stop() == 0
    assert deployment.hunt.found() == set()
    assert any((tmp_path / "journal").rglob("*.parquet"))
    assert len({place for place, _ in deployment.hunt.answers}) > 4 * len(PATHS)


def test_the_hunt_finds_a_credential_in_every_place(deployment: Deployment, tmp_path: Path) -> None:
    """Otherwise the test above would mean nothing."""
    hunt, known = deployment.hunt, deployment.hunt.credentials.all()
    assert hunt.found() == set()
    data, log = deployment.proxies[3].data_folder / "planted", tmp_path / "proxies" / "flags" / "output.log"
    with log.open("a") as stream:
        stream.write("\n".join(known.values()))
    data.write_text("\n".join(known.values()))
    for text in known.values():
        deployment.redis.ask("SET", f"value-{text}", "x" + text)
    hunt.answers.append(("plain", "".join(known.values()).encode()))
    hunt.answers.append(("percent", quote("".join(known.values()), safe="").encode()))
    for shift in range(3):
        hunt.answers += [("base64", base64.b64encode(b"y" * shift + text.encode() + b"yyy")) for text in known.values()]
    hunt.answers.append(("hexadecimal", "".join(known.values()).encode().hex().encode()))
    command = [sys.executable, "-c", "input()", *known.values()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        shown = Path(f"/proc/{process.pid}/cmdline")
        wait_until(lambda: bool(shown.read_bytes()), timeout_seconds=PATIENCE_SECONDS, what="its command line")
        found = hunt.found()
        process.kill()
    aof = next(place for place, _ in found if place.startswith("redis/appendonlydir"))
    places = ["proxies/flags/output.log", "proxies/alone/data/planted", aof, f"ps {process.pid}"]
    for place in (*places, "plain", "percent", "base64", "hexadecimal"):
        assert {name for where, name in found if where == place} == known.keys(), place
