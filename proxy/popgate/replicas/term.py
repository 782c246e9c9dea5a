"""What one keeper has under way while it holds the lock: changes, each a task, never two of one queue."""

import asyncio
import logging
from collections.abc import Callable

from popgate.domain.errors import LockLost, PopgateError
from popgate.domain.replicas import Change, QueueRef
from popgate.locks.grants import Grant
from popgate.ports.clock import Clock
from popgate.ports.replicas import ReplicaBroker
from popgate.replicas.changing import Ending, Outcome, carry_out
from popgate.replicas.events import KeeperEvent, KeeperRecord
from popgate.replicas.options import KeeperOptions

_log = logging.getLogger(__name__)

EVENTS = {Ending.DONE: KeeperEvent.DONE, Ending.DROPPED: KeeperEvent.DROPPED, Ending.FAILED: KeeperEvent.FAILED}


class Term:
    """``ended``: who wants to know that a change has ended, and how."""

    def __init__(
        self,
        grant: Grant,
        broker: ReplicaBroker,
        options: KeeperOptions,
        clock: Clock,
        record: KeeperRecord,
        ended: Callable[[Change, Outcome], None],
    ) -> None:
        self.grant = grant
        self._broker = broker
        self._options = options
        self._clock = clock
        self._record = record
        self._ended = ended
        self._under_way: dict[QueueRef, tuple[Change, asyncio.Task[None]]] = {}
        self.fencing_token = grant.fencing_token

    @property
    def changes(self) -> list[Change]:
        return [change for change, _ in self._under_way.values()]

    def begin(self, change: Change) -> None:
        """Start it. Nothing happens to a queue that is under change."""
        if change.queue in self._under_way:
            return
        self._record.note_change(KeeperEvent.STARTED, self._clock.wall(), change, change.reason, self.fencing_token)
        task = asyncio.create_task(
            self._carry_out(change), name=f"popgate {change.kind} replica of {change.queue.name}"
        )
        self._under_way[change.queue] = (change, task)

    async def wait(self, seconds: float) -> None:
        """Until a change ends, or for ``seconds``."""
        tasks = [task for _, task in self._under_way.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Let go of what is under way: what the broker was asked may yet take effect."""
        tasks = [task for _, task in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, change: Change) -> None:
        ending, reason = Ending.FAILED, "given up: the keeper stops"
        try:
            # Not by ``verify``: a node that was cut off from the others says yes to that.
            ending, reason = await carry_out(change, self._broker, self._options, self._clock, self.grant.renew)
        except LockLost as error:
            ending, reason = Ending.DROPPED, error.detail
        except PopgateError as error:
            reason = error.detail
        except Exception as error:  # an answer that nobody has foreseen must not end the keeper
            _log.exception("a change of replicas has failed")
            reason = repr(error)
        finally:
            del self._under_way[change.queue]
            self._record.note_change(EVENTS[ending], self._clock.wall(), change, reason, self.fencing_token)
            self._ended(change, Outcome(ending, reason))
