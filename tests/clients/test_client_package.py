"""A plain `pip install` gives the thin client: it installs only httpx, and imports nothing of the proxy."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
INSTALL_SECONDS = 120
# httpx and what it needs itself.
EXPECTED = {"popgate", "httpx", "httpcore", "h11", "anyio", "certifi", "idna", "sniffio", "typing_extensions"}

PROBE = """
import importlib.metadata, json, sys
import popgate_client
print(json.dumps({
    "distributions": sorted(each.name for each in importlib.metadata.distributions()),
    "proxy": sorted(name for name in sys.modules if name.partition(".")[0] == "popgate"),
    "names": sorted(name for name in popgate_client.__all__ if not hasattr(popgate_client, name)),
}))
"""


@pytest.fixture(scope="module")
def plain_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new virtual environment with only `pip install .`."""
    folder = tmp_path_factory.mktemp("plain") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # The pip at hand installs into it: half the time of giving it one of its own.
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "--quiet", str(REPOSITORY)],
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (site / "popgate_client" / "py.typed").exists()
    assert (site / "pyspark_popgate" / "__init__.py").is_file()  # by which Spark finds popgate
    return folder / "bin"


def test_a_plain_install_pulls_httpx_only_and_imports(plain_install: Path) -> None:
    probe = [str(plain_install / "python"), "-I", "-W", "error", "-c", PROBE]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=True)
    found = json.loads(done.stdout)
    assert {"popgate", "httpx"} <= set(found["distributions"]) <= EXPECTED
    assert found["proxy"] == []
    assert found["names"] == []


def test_without_the_server_extra_the_command_says_what_to_install(plain_install: Path) -> None:
    done = subprocess.run(
        [plain_install / "popgate", "serve"], capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'popgate[server]'" in done.stderr


def test_without_the_pull_extra_the_consumer_on_bare_rabbitmq_says_what_to_install(plain_install: Path) -> None:
    probe = [str(plain_install / "python"), "-I", "-c", "import popgate_client.amqp"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    assert done.stderr.splitlines()[-1].endswith("pip install 'popgate[pull]'")
