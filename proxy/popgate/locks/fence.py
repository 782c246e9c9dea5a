"""The protected resource's side of a lock: refuses clients that no longer hold it.

A holder that is suspended, in a long garbage collection or behind a cut network, can't know that the broker has handed
its lock on. Its token shows it: a resource that has seen a higher token refuses it. That has to happen in one atomic
step with the write; after a separate check, the client could be suspended again before the write.
"""

from popgate.domain.errors import LockLost


class Fence:
    """Keeps the highest token of one slot of one lock, for a resource that is a single process.

    Call ``admit`` in the same synchronous step as the write. The token is lost when the process ends. So delay the
    first write of a new process until former holders have given up, or keep the token with the data (as ``RedisFence``
    does).
    """

    def __init__(self, highest: int = 0) -> None:
        self.highest = highest

    def admit(self, token: int) -> None:
        """Accept a token and remember it. Raises: LockLost, if a later holder was here before."""
        if token < self.highest:
            raise LockLost(f"token {token} is overtaken by {self.highest}: its lock was handed on")
        self.highest = token
