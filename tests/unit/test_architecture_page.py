"""docs/architecture.md names files and classes that exist."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
PRODUCT = REPOSITORY / "proxy" / "popgate"
PATHS = sorted(
    set(re.findall(r"[a-z_]+(?:/[a-z_]+)+(?:\.py|\.lua)?|\b[a-z_]+\.py\b", re.sub(r"\]\([^)]*\)", "", PAGE)))
)


@pytest.mark.parametrize("path", [path for path in PATHS if path.partition("/")[0] not in ("tests", "proxy")])
def test_a_file_that_the_page_names_exists(path: str) -> None:
    found = [*PRODUCT.glob(path), *PRODUCT.glob(f"engine/*/{path}")]
    assert found, f"docs/architecture.md names {path}"


@pytest.mark.parametrize("name", ["BufferedMessage", "QueueHost", "QueueState", "Effects", "BufferBudget"])
def test_a_class_that_the_page_names_exists(name: str) -> None:
    assert f"`{name}`" in PAGE
    assert any(f"class {name}" in path.read_text() for path in (PRODUCT / "engine").rglob("*.py"))


def test_the_page_has_every_package_of_the_engine() -> None:
    packages = {path.parent.name for path in (PRODUCT / "engine").glob("*/__init__.py")}
    assert packages == {name for name in packages if f"engine/{name}`" in PAGE}
