"""One proxy with everything embedded, over a real SQLite file on a simulated disk.

This module owns the order of its start and stop, and runs the store in virtual time: jobs that production runs on the
store's thread run on the event loop, a moment after they were submitted. Each process of the proxy has a separate
folder with what the process before has left.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from popgate.adapters.sqlite.assignments import SqliteAssignments
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.adapters.sqlite.database import PROBE_INTERVAL_SECONDS, Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.group_commit import PendingJob
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.engine.context.engine_context import EngineOptions, make_context
from popgate.engine.engine import Engine
from popgate.journal.counters import EventCounters
from popgate.ports.clock import Clock
from popgate.runtime.background import Background
from simulator.loop import VirtualClock, VirtualLoop
from simulator.network import Network
from simulator.peers import SimulatedPeers
from simulator.processes import Process
from simulator.proxy import BUFFER_BYTES, GRACE_SECONDS, PART_SECONDS, SECRET, WALL, in_time

COMMIT_SECONDS = 0.0002, 0.02
LOG_PAGES = 40
"""Pages after which the log is checkpointed into the file: production has 50 times as many."""


class SimulatedDatabase(Database):
    """The store without a thread. Its jobs run ``seconds()`` after they were submitted."""

    def __init__(self, path: Path, clock: Clock, seconds: Callable[[], float]) -> None:
        super().__init__(path, clock)
        self._seconds = seconds
        self._is_due = False

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin()
        assert self._connection is not None
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}").fetchall()
        self._is_open = True

    async def close(self) -> None:
        if self._is_open and self._committer is not None:
            self._is_open = False
            self._jobs.put(None)
            self._serve(self._committer)
            self._end()
        self._let_go()

    def abandon(self) -> None:
        """Close the machine's open handles, because the process is dead."""
        self._let_go()

    def _submit(self, pending: PendingJob[Any]) -> None:
        super()._submit(pending)
        self._serve_soon(self._seconds())

    def _serve_soon(self, seconds: float) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(seconds, self._serve_due)

    def _serve_due(self) -> None:
        self._is_due = False
        assert self._committer is not None
        if not self._is_open:
            return
        if not self._jobs.empty():
            self._serve_group(self._committer)
        else:
            self._committer.probe()
        if not self._jobs.empty():
            self._serve_soon(self._seconds())
        elif self._committer.failure is not None:
            self._serve_soon(PROBE_INTERVAL_SECONDS)


class EmbeddedProxy:
    """One start of a process, on the files in ``folder``. ``name`` is never reused."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        loop: VirtualLoop,
        chance: random.Random,
        network: Network,
        failures: list[str],
    ) -> None:
        self.me = InstanceId(name)
        self.folder = folder
        self.process = Process(loop, name)
        self.is_up = False
        self.refusal: PopgateError | None = None
        """The reason why it does not start."""
        background = Background(lambda error: failures.append(f"{name}: a background task failed: {error!r}"))
        self.clock = VirtualClock(loop, zero=chance.uniform(-500.0, 500.0), wall=WALL)
        self.database = SimulatedDatabase(folder / "popgate.db", self.clock, lambda: chance.uniform(*COMMIT_SECONDS))
        self.broker = SqliteBroker(self.database)
        records = LatestRecords()
        context = make_context(
            EngineOptions(instance=name, secrets=[SECRET], auto_create=False, buffer_bytes_max=BUFFER_BYTES),
            broker=self.broker,
            leases=SqliteLeaseStore(self.database, records),
            lease_groups=SqliteLeaseGroups(self.database, records),
            assignments=SqliteAssignments(self.database),
            dedup=SqliteDedupStore(self.database),
            catalog=SqliteCatalog(self.database),
            journal=EventCounters(),
            clock=self.clock,
            background=background,
        )
        self.engine = Engine(context)
        self.peers = SimulatedPeers(self.me, self.process, network, {}, dict)

    # -- life, in the process -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Serve; end the process if it can't start."""
        try:
            await self.database.open()
            await self.broker.start()
            await self.engine.start()
        except PopgateError as error:
            self.refusal = error
            self.kill()
            return
        self.is_up = True

    async def leave(self) -> None:
        """Stop in order, as after SIGTERM."""
        await in_time(self.engine.drain(), GRACE_SECONDS)
        self.is_up = False
        await in_time(self.engine.stop(), PART_SECONDS)
        await in_time(self.broker.stop(), PART_SECONDS)
        await self.database.close()
        self.kill()

    # -- what is done to it ---------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process as by SIGKILL."""
        self.is_up = False
        self.process.kill()

    def bury(self) -> None:
        self.process.bury()
        self.database.abandon()
