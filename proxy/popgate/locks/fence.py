"""Implements the protected resource's side of a lock: refuses clients that no longer hold the lock.

A holder that is suspended, by a long garbage collection or a cut network, can't know that the broker has given its lock
to another client. The fencing token reveals this: a resource that has seen a higher token refuses the write. The check
has to be one atomic step with the write: after a separate check, the client could be suspended again before the write.
"""

from popgate.domain.errors import LockLost


class Fence:
    """Holds the highest token of one slot of one lock, for a resource that is a single process.

    Call ``admit`` in the same synchronous step as the write. The highest token is lost when the process ends. So delay
    the first write of a new process until former holders have given up, or store the token with the data (as
    ``RedisFence`` does).
    """

    def __init__(self, highest: int = 0) -> None:
        self.highest = highest

    def admit(self, token: int) -> None:
        """Accept a token and record it as the highest. Raises: LockLost if a higher token was accepted before."""
        if token < self.highest:
            raise LockLost(f"token {token} is overtaken by {self.highest}: its lock was handed on")
        self.highest = token
