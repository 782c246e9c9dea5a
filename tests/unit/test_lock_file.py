"""The lock files of the images fit pyproject.toml, and contain everything that is installed."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.lock_files import IMAGES, LOCKS, PROJECT, Pin, lock_problems, misfits, read_lock, wanted

HASH = "    --hash=sha256:" + "0" * 64


def needs(name: str, version: str, extras: set[str]) -> set[str]:
    """Return what a package needs in the images, if the same version of it is installed here."""
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return set()
    if installed.version != version:  # it may need other packages
        return set()
    found: set[str] = set()
    for requirement in map(Requirement, installed.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**IMAGES, "extra": extra}) for extra in {"", *extras}):
            found.add(canonicalize_name(requirement.name))
    return found


def test_the_lock_files_fit_the_ranges_of_pyproject() -> None:
    assert lock_problems() == [], "run: make lock"


@pytest.mark.parametrize("file", LOCKS)
def test_a_lock_file_contains_what_its_packages_need(file: str) -> None:
    pins = read_lock((PROJECT / "deploy" / file).read_text())
    extras: dict[str, set[str]] = {canonicalize_name(one.name): one.extras for one in wanted(LOCKS[file])}
    missing = {need for name, pin in pins.items() for need in needs(name, pin.version, extras.get(name, set()))}
    assert missing - set(pins) == set()


def test_both_images_have_the_same_versions() -> None:
    proxy, pipeline = (read_lock((PROJECT / "deploy" / file).read_text()) for file in list(LOCKS)[:2])
    common = set(proxy) & set(pipeline)
    assert {name: proxy[name].version for name in common} == {name: pipeline[name].version for name in common}


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://packages.example.org/simple",
        "--find-links /opt/wheels",
        "httpx @ https://packages.example.org/httpx.whl",
        "./httpx.whl",
        "httpx>=0.28 \\",
        "    --hash=md5:00",
    ],
)
def test_a_lock_file_names_no_host_no_path_and_no_range(line: str) -> None:
    with pytest.raises(ValueError, match="line 3 is neither"):
        read_lock(f"httpx==0.28.1 \\\n{HASH}\n{line}\n")


def test_a_pin_that_does_not_fit_is_named() -> None:
    pins = read_lock(f"# comment\nhttpx==0.26.0 \\\n{HASH} \\\n{HASH}\nyarl==1.9 ; sys_platform == 'linux' \\\n")
    assert pins == {"httpx": Pin(version="0.26.0", hashes=2), "yarl": Pin(version="1.9", hashes=0)}
    assert misfits(pins, map(Requirement, ["httpx>=0.27", "Msgspec>=0.19", "yarl>=1.9,<2"])) == [
        "httpx 0.26.0 is not in the range >=0.27",
        "Msgspec is missing",
        "yarl has no hash",
    ]
