"""Ends waits that ``asyncio.timeout`` limits before their time is over."""

import asyncio


def expire_now(limit: asyncio.Timeout) -> None:
    """Let ``limit`` expire now. Without effect if it is expiring already: asyncio raises an error in this case."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
