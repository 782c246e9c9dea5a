"""The protected resource's side of a lock: refusing whoever no longer holds it.

A holder that stands still, in a long garbage collection or behind a cut network, can't know that the broker has handed
its lock on. Its token can tell: a resource that has seen a higher one refuses it. That has to happen where the write
happens, in one atomic step with it; a check before the write is only another moment to stand still in.
"""

from popgate.domain.errors import LockLost


class Fence:
    """For a resource that is one process: the highest token that it has seen, of one slot of one lock.

    Call ``admit`` in the same synchronous step as the write. Its memory ends with the process: then let the first write
    wait until whoever might still write has given up, or keep the token with the data (as ``RedisFence`` does).
    """

    def __init__(self, highest: int = 0) -> None:
        self.highest = highest

    def admit(self, token: int) -> None:
        """Raises: LockLost, where a later holder was here before."""
        if token < self.highest:
            raise LockLost(f"token {token} is overtaken by {self.highest}: its lock was handed on")
        self.highest = token
