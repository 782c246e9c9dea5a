"""How long a consumer's leases are: as its caller said, else as the group's policy says.

The answer to a pop does not tell. `invisible_until` is a moment of the store's clock, which need not be this machine's,
and `first_delivered_at` is its beginning only for a message that nobody had before. So the policy is read, and read
again now and then, because it may be changed while consumers run.

It is read after a pop that brought messages, not before it: then the group exists, which popping may have created. A
first reading that fails fails the pop, which is repeated with its `attempt_id` and gets the same leases; a later one
leaves the length as it was. A policy that is shortened is noticed within POLICY_SECONDS and one pop; until then leases
may end under their handlers, which is told and counted as always.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from popgate_client.errors import PopgateError

logger = logging.getLogger(__name__)

POLICY_SECONDS = 30.0
"""How old a reading of the policy may be."""
ASSUMED_SECONDS = 30.0
"""For the pauses before the first reading, and for nothing else."""

ReadCall: TypeAlias = Callable[[], Awaitable[float]]
"""Reads `invisibility_seconds` of the group's policy; raises PopgateError."""


class LeaseLength:
    """The length of the leases that the latest pop gave. `given_seconds` None: as the policy says."""

    def __init__(self, read: ReadCall, given_seconds: float | None) -> None:
        self._read = read
        self._given = given_seconds is not None
        self._read_at: float | None = None
        self.seconds = ASSUMED_SECONDS if given_seconds is None else given_seconds

    async def refresh(self) -> bool:
        """Make sure of the length, for leases that a pop has just given; True where that took time.

        Raises: PopgateError where the length is not known.
        """
        clock = asyncio.get_running_loop().time
        if self._given or (self._read_at is not None and clock() < self._read_at + POLICY_SECONDS):
            return False
        try:
            self.seconds = await self._read()
        except PopgateError as error:
            if self._read_at is None:
                raise
            logger.warning("the group's policy could not be read again", extra={"error": repr(error)})
        self._read_at = clock()
        return True
