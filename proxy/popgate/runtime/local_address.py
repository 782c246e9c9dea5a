"""Finds the address by which other machines can reach this machine."""

import asyncio
import socket


async def local_address_towards(host: str, port: int) -> str:
    """Return the local IP address that the system uses for connections to ``host``.

    Sends no packet to ``host``. Raises: OSError.
    """
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM))[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)  # with UDP, the system chooses a route, and sends nothing
        found: str = towards.getsockname()[0]
        return found
