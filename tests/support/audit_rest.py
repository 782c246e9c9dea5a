"""Counts that are read while no client is active, for the audit to compare with its model."""

import asyncio

from support.audit import Verb
from support.audit_load import Load
from support.audit_model import unlike_model

REST_SECONDS_MAX = 60.0
LATE_SECONDS = 1.5
"""Seconds from a pop to the late ack: half a second after the end of a lease of the minimum length."""
HELD_MAX, HELD_SECONDS = 5, 60
"""Number and length in seconds of the leases that are live while the counts are read."""


async def note_counts(load: Load, *, run_out_seconds: float, looks_max: int, look_seconds: float) -> None:
    """Keep the clients idle until their leases have run out. Then ack a few messages late, which no other client can
    have got, lease a few more, and record the counts as soon as they fit, or else the last ones. Raises:
    TimeoutError.
    """
    client, audit = load.client, load.audit
    async with load.at_rest(timeout_seconds=REST_SECONDS_MAX):
        await asyncio.sleep(run_out_seconds)
        late = await client.pop("who is late", max_messages=HELD_MAX, seconds=1)
        if late:
            await asyncio.sleep(LATE_SECONDS)
            await client.settle_surely(Verb.ACK, late)
        held = await client.pop("who looks", max_messages=HELD_MAX, seconds=HELD_SECONDS)
        seen = await client.look()
        for _ in range(looks_max):
            if not any(unlike_model(audit, seen)):
                break
            await asyncio.sleep(look_seconds)
            seen = await client.look()
        audit.seen.append(seen)
        if held:
            await client.settle_surely(Verb.RELEASE, held)
