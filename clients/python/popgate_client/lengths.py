"""Finds the length of a consumer's leases: the one that its caller set, or that of the group's policy.

The answer to a pop does not contain it. `invisible_until` is a time of the store's clock, which may differ from this
machine's, and `first_delivered_at` is the lease's beginning only for a message that was never delivered before. So the
policy is read, and read again from time to time, because it may change while consumers run.

It is read after a pop that returned messages, not before it, because the pop may have created the group. As long as no
read has succeeded, new leases are extended at once: an extension sets the length, so it is known without the policy. If
a later read fails, the length stays as it was. A shortened policy is noticed within POLICY_SECONDS and one pop; until
then leases may end during their handlers, which is reported and counted as usual.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from popgate_client.errors import PopgateError
from popgate_client.facts import FactLogger, cause_of

logger = FactLogger(__name__)

POLICY_SECONDS = 30.0
"""Seconds for which a read policy is used before it is read again."""
ASSUMED_SECONDS = 30.0
"""Lease length in seconds until the policy is read: the one to which leases are extended."""
UNKNOWN_SECONDS = 1.0
"""Seconds until a policy that was never read is read again."""

ReadCall: TypeAlias = Callable[[], Awaitable[float]]
"""Reads `invisibility_seconds` of the group's policy; raises PopgateError."""


class LeaseLength:
    """Holds the length of the leases of the latest pop. `given_seconds` None: as the policy says."""

    def __init__(self, read: ReadCall, given_seconds: float | None) -> None:
        self._read = read
        self._given = given_seconds is not None
        self._is_known = False
        self._read_again_at = 0.0
        self.seconds = ASSUMED_SECONDS if given_seconds is None else given_seconds

    async def refresh(self) -> bool:
        """Read the length for leases that a pop has just granted; True if they must be extended at once, because that
        took time or failed."""
        clock = asyncio.get_running_loop().time
        if self._given:
            return False
        if clock() < self._read_again_at:
            return not self._is_known
        try:
            self.seconds = await self._read()
            self._is_known = True
        except PopgateError as error:
            logger.warning("the group's policy could not be read", extra={"cause": cause_of(error)})
        self._read_again_at = clock() + (POLICY_SECONDS if self._is_known else UNKNOWN_SECONDS)
        return True
