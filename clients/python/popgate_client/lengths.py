"""Finds the length of a consumer's leases: the one that its caller set, or that of the group's policy.

The answer to a pop does not contain it. `invisible_until` is a time of the store's clock, which may differ from this
machine's, and `first_delivered_at` is the lease's beginning only for a message that was never delivered before. So the
policy is read, and read again from time to time, because it may change while consumers run.

It is read after a pop that returned messages, not before it, because the pop may have created the group. If the first
read fails, the pop fails too; it is repeated with its `attempt_id` and gets the same leases. If a later read fails, the
length stays as it was. A shortened policy is noticed within POLICY_SECONDS and one pop; until then leases may end
during their handlers, which is reported and counted as usual.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from popgate_client.errors import PopgateError

logger = logging.getLogger(__name__)

POLICY_SECONDS = 30.0
"""Seconds for which a read policy is used before it is read again."""
ASSUMED_SECONDS = 30.0
"""Lease length in seconds before the first read of the policy; only the pauses depend on it."""

ReadCall: TypeAlias = Callable[[], Awaitable[float]]
"""Reads `invisibility_seconds` of the group's policy; raises PopgateError."""


class LeaseLength:
    """Holds the length of the leases of the latest pop. `given_seconds` None: as the policy says."""

    def __init__(self, read: ReadCall, given_seconds: float | None) -> None:
        self._read = read
        self._given = given_seconds is not None
        self._read_at: float | None = None
        self.seconds = ASSUMED_SECONDS if given_seconds is None else given_seconds

    async def refresh(self) -> bool:
        """Read the length for leases that a pop has just granted; True if that needed a request.

        Raises: PopgateError if the length is not known.
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
