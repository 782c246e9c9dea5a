"""Modules that the client shares with the proxy: the client imports nothing of the proxy, so it has copies."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["balance.py", "exclusive_names.py"])
def test_the_clients_copy_of_a_module_is_the_proxys(name: str) -> None:
    ours = REPOSITORY / "proxy" / "popgate" / "domain" / name
    copy = REPOSITORY / "clients" / "python" / "popgate_client" / "amqp" / name
    assert not copy.is_symlink(), "Windows and source archives do not keep links"
    assert copy.read_bytes() == ours.read_bytes(), f"change {ours} and copy it to {copy}"
