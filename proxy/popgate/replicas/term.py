"""Runs the changes of a keeper while the keeper holds the lock.

Each change runs in a task. At any time, at most one change of each queue is in progress.
"""

import asyncio
import logging
from collections.abc import Callable

from popgate.domain.errors import LockLost, PopgateError
from popgate.domain.replicas import Change, QueueRef
from popgate.locks.grants import Grant
from popgate.ports.clock import Clock
from popgate.ports.replicas import ReplicaBroker
from popgate.replicas.changing import ChangeOutcome, Ending, carry_out
from popgate.replicas.events import KeeperEvent, KeeperRecord
from popgate.replicas.options import KeeperOptions

_log = logging.getLogger(__name__)

EVENTS = {Ending.DONE: KeeperEvent.DONE, Ending.DROPPED: KeeperEvent.DROPPED, Ending.FAILED: KeeperEvent.FAILED}


class Term:
    """Runs changes while the keeper holds ``grant``.

    After each change, calls ``ended`` with the change and its outcome.
    """

    def __init__(
        self,
        grant: Grant,
        broker: ReplicaBroker,
        options: KeeperOptions,
        clock: Clock,
        record: KeeperRecord,
        ended: Callable[[Change, ChangeOutcome], None],
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
        """Start a change, unless another change of the same queue is in progress."""
        if change.queue in self._under_way:
            return
        self._record.note_change(KeeperEvent.STARTED, self._clock.wall(), change, change.reason, self.fencing_token)
        task = asyncio.create_task(
            self._carry_out(change), name=f"popgate {change.kind} replica of {change.queue.name}"
        )
        self._under_way[change.queue] = (change, task)

    async def wait(self, seconds: float) -> None:
        """Wait until any change in progress ends, but at most ``seconds``."""
        tasks = [task for _, task in self._under_way.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Cancel the changes in progress. Requests that were already sent to the broker may still take effect."""
        tasks = [task for _, task in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, change: Change) -> None:
        ending, reason = Ending.FAILED, "cancelled, because the keeper stops"
        try:
            # ``verify`` is not sufficient, because a node that is cut off from the other nodes would still confirm the
            # lock.
            ending, reason = await carry_out(change, self._broker, self._options, self._clock, self.grant.renew)
        except LockLost as error:
            ending, reason = Ending.DROPPED, error.detail
        except PopgateError as error:
            reason = error.detail
        except Exception as error:  # an unexpected answer of the broker must not stop the keeper
            _log.exception("a change of replicas has failed")
            reason = repr(error)
        finally:
            del self._under_way[change.queue]
            self._record.note_change(EVENTS[ending], self._clock.wall(), change, reason, self.fencing_token)
            self._ended(change, ChangeOutcome(ending, reason))
