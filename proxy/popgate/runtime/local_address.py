"""Which of this machine's addresses others see."""

import asyncio
import socket


async def local_address_towards(host: str, port: int) -> str:
    """The local address from which ``host`` is reached. No packet is sent. Raises: OSError."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM))[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)  # of UDP: the system chooses a way, and goes none
        found: str = towards.getsockname()[0]
        return found
