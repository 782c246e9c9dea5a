"""Connects to the Redis that stores the shared state, runs scripts in one namespace of keys, and detects lost data.

The incarnation is a random name that Redis stores with the data. Every script receives the incarnation that its caller
knows, and changes nothing if Redis has another one, because then Redis has lost the earlier data. This module also
translates Redis's errors, and reports why the latest call failed.

A write that Redis has answered is on disk only with ``appendfsync always``. With ``everysec``, Redis's default, a crash
loses the writes of up to two seconds. This is true even if only the Redis process crashes, because it delays its writes
while a sync runs. A failover to a replica can lose answered writes, too.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import NoScriptError, RedisError, ResponseError

from popgate.adapters.redis.address import RedisAddress
from popgate.adapters.redis.failures import RETRY_AFTER_SECONDS, state_failure
from popgate.adapters.redis.pipelined_connection import PipelinedConnection
from popgate.adapters.redis.scripts import script
from popgate.adapters.redis.texts import NOT_TEXT, read_pairs, read_text
from popgate.domain.errors import StateUnavailable
from popgate.runtime.histogram import Histogram
from popgate.runtime.logs import OnceLogger

_log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
_ANEW, _UNCLAIMED = "POPGATE_ANEW", "POPGATE_UNCLAIMED"


class RedisConnection:
    """A connection to one namespace of keys in Redis.

    ``namespace`` separates the keys of one popgate deployment from those of other deployments in the same database. The
    first call connects. If the connection has been lost, the next call connects again.
    """

    def __init__(self, address: RedisAddress, namespace: str = "default") -> None:
        self.address = address
        self.place = address.place
        self.prefix = f"popgate:{namespace}:"
        self._pipeline = PipelinedConnection(address)
        self._incarnation: bytes | None = None
        self._kept: dict[str, str] = {}
        self._kept_hashes: dict[str, dict[str, str]] = {}
        """Fields of hashes that the first script after a loss of Redis's data writes back, like the values in
        ``_kept``."""
        self._unreadable = OnceLogger(_log, "an entry in Redis is not UTF-8; it is ignored")
        self._failure: str | None = None
        self._lost: list[Callable[[], None]] = []

    @property
    def exchange_seconds(self) -> Histogram:
        """How long the exchanges with Redis took."""
        return self._pipeline.exchange_seconds

    def failure(self) -> str | None:
        """Return why the latest call to Redis failed, or None if it succeeded."""
        return self._failure

    def on_data_loss(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` whenever this process detects that Redis has lost its data, and all records with it.

        When ``tell`` is called, this process has not yet run a script on the new data.
        """
        self._lost.append(tell)

    @property
    def incarnation(self) -> bytes | None:
        """The incarnation of the data that this process uses, or None if the next call of ``run`` must read it."""
        return self._incarnation

    async def run(self, name: str, *request: object, answer_type: Any = Any) -> Any:
        """Run the script ``name`` with the arguments ``request``, and return its answer as ``answer_type``.

        Redis runs a script completely or not at all.

        Raises: StateUnavailable. If Redis refused the script, the script has changed nothing. If Redis did not answer,
        the script may have run.
        """
        if self._incarnation is None:
            self._incarnation = await self._execute(
                "name_data", b"", secrets.token_hex(8), self._kept, self._kept_hashes
            )
        known = self._incarnation
        try:
            answer = await self._execute(name, known, *request)
        except ResponseError as error:
            if _ANEW in str(error):
                raise self._data_lost(known) from error
            if _UNCLAIMED in str(error):
                detail = f"Redis at {self.place} has lost its data, and the owner of a queue has yet to write them back"
                raise StateUnavailable(detail, retry_after_seconds=RETRY_AFTER_SECONDS) from error
            raise
        return msgspec.msgpack.decode(answer, type=answer_type)

    async def read_hash(self, name: str) -> list[tuple[str, str]]:
        """Return the fields and values of a small hash of texts, sorted by field. Raises: StateUnavailable.

        Names that are not UTF-8 are left out, and such values are ``NOT_TEXT``.

        Every process that has read the hash remembers its fields, and writes them back if Redis loses its data. If a
        process does not learn that another process has deleted a field, it writes this field back, too.
        """
        packed = await self.run("read", name, answer_type=msgspec.Raw)
        fields = dict(read_pairs(packed, self._unreadable, spoilt=NOT_TEXT))
        self._kept_hashes[name] = fields
        return sorted(fields.items())

    async def read_field(self, name: str, field: str) -> str | None:
        """Return the text of a field of a hash, or ``NOT_TEXT``, or None if it is missing. Raises: StateUnavailable."""
        return read_text(await self.run("find", name, field, answer_type=msgspec.Raw))

    def remember_field(self, name: str, field: str, value: str) -> None:
        """Remember a field that this process has written to a hash, to write it back if Redis loses its data."""
        self._kept_hashes.setdefault(name, {})[field] = value

    def forget_field(self, name: str, field: str) -> None:
        """Forget a field that this process has deleted from a hash, so that it is not written back."""
        self._kept_hashes.get(name, {}).pop(field, None)

    async def command(self, *words: str | bytes | int) -> Any:
        """Run one command. Raises: StateUnavailable, or ResponseError if Redis rejects the command."""
        try:
            answer = await self._pipeline.call(*words)
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:  # a TimeoutError is an OSError
            failure = state_failure(error, self.place)
            if failure is None:
                raise
            if self._failure is None:
                _log.warning("Redis is unavailable", extra={"place": self.place, "error": failure.detail})
            self._failure = failure.detail
            raise failure from error
        if self._failure is not None:
            self._failure = None
            _log.info("Redis is back", extra={"place": self.place})
        return answer

    async def bound_broker(self) -> str | None:
        """Return the mark that ``bind_broker`` stored, or None if Redis has no mark. Raises: StateUnavailable."""
        mark: bytes | None = await self.command("GET", f"{self.prefix}broker")
        if mark is None:
            return None
        self._kept["broker"] = mark.decode()
        return self._kept["broker"]

    async def bind_broker(self, mark: str) -> None:
        """Store the mark of the broker whose messages the records in this namespace describe.

        An existing mark is not changed.

        Raises: StateUnavailable.
        """
        await self.command("SET", f"{self.prefix}broker", mark, "NX")

    async def cluster(self) -> str:
        """Return the cluster name that all processes in this namespace share. The first process creates the name.

        Raises: StateUnavailable.
        """
        return (await self._keep("cluster", secrets.token_hex(8).encode())).decode()

    async def _keep(self, name: str, first: bytes) -> bytes:
        """Return the stored value of ``name``. If there is no value, store ``first``, and return it.

        This process writes the value back if Redis loses it, so that new processes use the same value as old ones.
        """
        key = f"{self.prefix}{name}"
        await self.command("SET", key, first, "NX")
        found: bytes = await self.command("GET", key)
        self._kept[name] = found.decode()
        return found

    async def look(self, *words: str) -> Any | None:
        """Run an administrator's command, and return its answer, or None if Redis rejects the command.

        Raises: StateUnavailable if Redis itself can't be used.
        """
        await self.command("PING")  # so that a failure of Redis itself is reported as such
        with contextlib.suppress(RedisError, OSError):
            return await self._pipeline.call(*words)
        return None

    async def watch(self) -> None:
        """Check regularly whether Redis answers, and whether it has lost its data. Never returns.

        So ``failure`` is correct, and a loss of data is detected, even if there are no other calls.
        """
        while True:
            with contextlib.suppress(StateUnavailable, ResponseError):  # ``command`` has recorded and logged a failure
                known = self._incarnation
                stands = await self.command("GET", f"{self.prefix}incarnation")
                if known is not None and stands != known:
                    self._data_lost(known)
            await asyncio.sleep(WATCH_SECONDS)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._pipeline.close()

    async def _execute(self, name: str, incarnation: bytes, *request: object) -> bytes:
        """Run a script, and pass it the incarnation that the caller knows, or b"" if the caller knows none."""
        known, arguments = script(name), (self.prefix, incarnation, msgspec.msgpack.encode(request))
        try:
            answer: bytes = await self.command("EVALSHA", known.sha, 0, *arguments)
        except NoScriptError:  # Redis does not have the script yet, or was restarted
            answer = await self.command("EVAL", known.text, 0, *arguments)
        return answer

    def _data_lost(self, known: bytes) -> StateUnavailable:
        """Forget the incarnation ``known``, and return the error to raise.

        Only the first call for this incarnation calls the functions of ``on_data_loss``.
        """
        detail = f"Redis at {self.place} has lost its data: leases and settlements until now are forgotten"
        if self._incarnation == known:
            self._incarnation = None
            _log.error("Redis has lost its data", extra={"place": self.place, "prefix": self.prefix})
            for tell in self._lost:
                tell()
        return StateUnavailable(detail, retry_after_seconds=RETRY_AFTER_SECONDS)
