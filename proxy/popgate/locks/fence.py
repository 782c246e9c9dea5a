"""Refuses, at a protected resource, the writes of clients that no longer hold the lock.

A holder that is suspended or cut off, for example by a long garbage collection or a network failure, can't notice that
the broker has granted its lock to another client. The protected resource can detect this with the fencing token: if it
has seen a higher token, it refuses the write. The check and the write must be one atomic step. Otherwise, the lock
could be granted to another client between the check and the write.
"""

from popgate.domain.errors import LockLost


class Fence:
    """Remembers the highest fencing token of one slot of a lock, for a resource that is a single process.

    Call ``admit`` and write in one synchronous step. When the process ends, the highest token is lost. So a new process
    must delay its first write until no former holder writes any more, or the highest token must be stored with the data
    (as ``RedisFence`` does).
    """

    def __init__(self, highest: int = 0) -> None:
        self.highest = highest

    def admit(self, token: int) -> None:
        """Accept ``token``, and store it as the highest token.

        Raises: LockLost if a higher token was accepted before.
        """
        if token < self.highest:
            raise LockLost(f"token {token} is overtaken by {self.highest}: its lock was handed on")
        self.highest = token
