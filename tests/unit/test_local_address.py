"""The choice of a reachable local address."""

import pytest

from popgate.runtime.local_address import local_address_towards


async def test_this_machine_reaches_itself_from_its_loopback_address() -> None:
    assert await local_address_towards("127.0.0.1", 6_379) == "127.0.0.1"
    assert await local_address_towards("localhost", 6_379) in ("127.0.0.1", "::1")


async def test_an_unknown_host_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError):  # noqa: PT011 - its text is the system's
        await local_address_towards("no-such-host.invalid", 6_379)
