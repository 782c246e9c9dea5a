"""The wheel and the source distribution, installed into new virtual environments, serve and are used as users do."""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from support.proxy import ProxyProcess

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 300
UV = (sys.executable, "-m", "uv")


def run(*words: str | Path) -> str:
    """Run a program outside of the repository, and return its output."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two distributions. The wheel is built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(*UV, "build", "--quiet", "--out-dir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def installed(folder: Path, requirement: str) -> Path:
    """Install a requirement into a new virtual environment, and return the folder of its programs."""
    run(*UV, "venv", "--quiet", "--python", sys.executable, folder)
    run(*UV, "pip", "install", "--quiet", "--python", folder / "bin" / "python", requirement)
    return folder / "bin"


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_fresh_install_serves_its_pages_and_messages(built: dict[str, Path], kind: str, tmp_path: Path) -> None:
    programs = installed(tmp_path / "venv", f"popgate[server] @ {built[kind].as_uri()}")
    place = run(programs / "python", "-c", "import popgate; print(popgate.__file__)")
    assert place.startswith(str(tmp_path / "venv")), "it is not the repository's"
    program: Sequence[str] = (str(programs / "popgate"),)
    with ProxyProcess(tmp_path, program=program) as proxy:
        url = ("--url", proxy.url)
        run(programs / "popgate", "publish", "hello", "Hello, world", *url)
        assert "Hello, world" in run(programs / "popgate", "pop", "hello", "--ack", *url)
        page = proxy.client.get("/docs")
        assert page.is_success
        for name in ("swagger-ui-bundle.js", "swagger-ui.css", "start.js"):
            assert proxy.client.get(f"/docs/{name}").is_success, name
        assert httpx.get(f"{proxy.url}/openapi.json").json()["info"]["version"] in run(
            programs / "popgate", "--version"
        )
        run(programs / "popgate", "backup", tmp_path / "backup", *url)
    run(programs / "popgate", "restore", tmp_path / "backup", "--check")
    assert (ROOT / "deploy" / "popgate.toml").read_text() == run(programs / "popgate", "config", "sample")


def test_the_distributions_have_every_file_of_the_packages_and_nothing_of_a_work_tree(built: dict[str, Path]) -> None:
    tracked = set(run("git", "-C", ROOT, "ls-files").splitlines())
    roots = ("proxy/", "clients/python/", "clients/spark/")
    packages = {
        name.removeprefix(root)
        for name in tracked
        for root in roots
        if name.startswith((f"{root}popgate", f"{root}pyspark_popgate"))
    }
    with zipfile.ZipFile(built["wheel"]) as wheel:
        assert packages == {name for name in wheel.namelist() if ".dist-info/" not in name}
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name for name in tracked if name.startswith(roots)} <= names
    assert not names - tracked - {"PKG-INFO"}
