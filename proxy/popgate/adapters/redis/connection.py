"""The shared state's Redis: one namespace of keys in it, the scripts that run there, and the reason of a failure.

Owns calls of scripts, the translation of errors, and the incarnation: a name that is stored beside the data. Every
script gets the incarnation that its caller knows, and changes nothing if Redis has another one: then Redis has lost the
earlier data.

Answered writes are on Redis's disk only with ``appendfsync always``. With ``everysec``, its default, a crash loses up
to two seconds, even a crash of Redis alone (it delays its writes while a sync runs); so does a failover to a replica.
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
from popgate.domain.errors import StateUnavailable

_log = logging.getLogger(__name__)

SECRET_BYTES = 32
"""Number of random bytes, written as twice as many hexadecimal digits."""
WATCH_SECONDS = 1.0
_ANEW, _UNCLAIMED = "POPGATE_ANEW", "POPGATE_UNCLAIMED"


class RedisConnection:
    """A connection to one namespace. ``namespace`` separates the keys of one deployment from others in the same
    database.

    The first call connects. Each call repairs a broken connection if that is possible.
    """

    def __init__(self, address: RedisAddress, namespace: str = "default") -> None:
        self.address = address
        self.place = address.place
        self.prefix = f"popgate:{namespace}:"
        self._pipeline = PipelinedConnection(address)
        self._incarnation: bytes | None = None
        self._kept: dict[str, str] = {}
        self._kept_hashes: dict[str, dict[str, str]] = {}
        """Values that the first call on new data writes back after Redis has lost its data."""
        self._failure: str | None = None
        self._lost: list[Callable[[], None]] = []

    def failure(self) -> str | None:
        """Return why the latest call failed, or None if it succeeded."""
        return self._failure

    def on_data_loss(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` whenever Redis turns out to have other data than before, so that all records are gone. This
        process has run no script on the new data then."""
        self._lost.append(tell)

    @property
    def incarnation(self) -> bytes | None:
        """The incarnation of the known data; None if the next script has to find it out."""
        return self._incarnation

    async def run(self, name: str, *request: object) -> Any:
        """Run the script ``name`` on ``request`` and return its answer. A script is done completely or not at all.

        Raises: StateUnavailable. Then nothing was done as far as is known, but a call without an answer may have been
        done.
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
        return msgspec.msgpack.decode(answer)

    async def read_hash(self, name: str) -> list[tuple[str, str]]:
        """Return the fields and values of a small hash of text, by field. Raises: StateUnavailable.

        Every process that has read them remembers them, and writes them back if Redis loses them. A process that was
        away when a field was deleted brings that field back.
        """
        flat: list[str] = await self.run("read", name)
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        self._kept_hashes[name] = fields
        return sorted(fields.items())

    def remember_field(self, name: str, field: str, value: str) -> None:
        """Remember a field that was written to a hash of ``read_hash``, so that it is written back, too."""
        self._kept_hashes.setdefault(name, {})[field] = value

    def forget_field(self, name: str, field: str) -> None:
        """Forget a field that was deleted, so that it is not written back."""
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
        """Return the mark of ``bind_broker``, or None before that and after a data loss. Raises: StateUnavailable."""
        mark: bytes | None = await self.command("GET", f"{self.prefix}broker")
        if mark is None:
            return None
        self._kept["broker"] = mark.decode()
        return self._kept["broker"]

    async def bind_broker(self, mark: str) -> None:
        """Record which broker the records here belong to, once. Raises: StateUnavailable."""
        await self.command("SET", f"{self.prefix}broker", mark, "NX")

    async def shared_secret(self) -> bytes:
        """Return the secret of all processes in this namespace. The first one creates it. Raises: StateUnavailable."""
        return await self._keep("secret", secrets.token_hex(SECRET_BYTES).encode())

    async def cluster(self) -> str:
        """Return a name for all processes in this namespace. The first one creates it. Raises: StateUnavailable."""
        return (await self._keep("cluster", secrets.token_hex(8).encode())).decode()

    async def _keep(self, name: str, first: bytes) -> bytes:
        """Return the value of ``name``, which is ``first`` if there was none. It is written back if Redis loses it,
        because new processes must agree with the present ones."""
        key = f"{self.prefix}{name}"
        await self.command("SET", key, first, "NX")
        found: bytes = await self.command("GET", key)
        self._kept[name] = found.decode()
        return found

    async def look(self, *words: str) -> Any | None:
        """Run an administrator's command; return None if this user may not run it. Raises: StateUnavailable."""
        await self.command("PING")  # so that a failure of Redis itself is reported as such
        with contextlib.suppress(RedisError, OSError):
            return await self._pipeline.call(*words)
        return None

    async def watch(self) -> None:
        """Check regularly whether Redis answers and has its data, so that ``failure`` is right and a loss is noticed
        even without calls. Endless."""
        while True:
            with contextlib.suppress(StateUnavailable, ResponseError):  # it was recorded and reported
                known = self._incarnation
                stands = await self.command("GET", f"{self.prefix}incarnation")
                if known is not None and stands != known:
                    self._data_lost(known)
            await asyncio.sleep(WATCH_SECONDS)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._pipeline.close()

    async def _execute(self, name: str, incarnation: bytes, *request: object) -> bytes:
        """Run a script for a caller that knows this incarnation, or none if it is empty."""
        known, arguments = script(name), (self.prefix, incarnation, msgspec.msgpack.encode(request))
        try:
            answer: bytes = await self.command("EVALSHA", known.sha, 0, *arguments)
        except NoScriptError:  # Redis is new, or was restarted
            answer = await self.command("EVAL", known.text, 0, *arguments)
        return answer

    def _data_lost(self, known: bytes) -> StateUnavailable:
        """Forget the incarnation ``known``; the first caller to notice notifies the others."""
        detail = f"Redis at {self.place} has lost its data: leases and settlements until now are forgotten"
        if self._incarnation == known:
            self._incarnation = None
            _log.error("Redis has lost its data", extra={"place": self.place, "prefix": self.prefix})
            for tell in self._lost:
                tell()
        return StateUnavailable(detail, retry_after_seconds=RETRY_AFTER_SECONDS)
