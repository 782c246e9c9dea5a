"""A lock that an `async with` block holds: renewed while the block runs, and given up when it can't be trusted.

Each held lock has one task. A blocked event loop renews nothing: then `is_lost` still turns true in time, but `lost`
and `on_loss` come late.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol, TypeAlias

from popgate_client.errors import LockLost, LockNotFound, PopgateError, RetryLater
from popgate_client.exchange import Exchange, Exchanges
from popgate_client.facts import FactLogger, cause_of
from popgate_client.lock_terms import term_clock
from popgate_client.locks import RELEASE_SECONDS_MAX, LockExchanges, LockGrant, default_holder
from popgate_client.wire import T

logger = FactLogger(__name__)

OnAsyncLoss: TypeAlias = Literal["cancel"] | Callable[["AsyncHeldLock"], object]
"""What happens when the lock is lost. `cancel`: the block's task is cancelled, and its `async with` raises LockLost. A
function is called."""


class _AsyncCaller(Protocol):
    async def perform(self, exchange: Exchange[T]) -> T: ...


class AsyncHeldLock:
    """A lock inside its block, from `AsyncClient.lock`. Fields and errors are those of `HeldLock`."""

    def __init__(
        self, client: _AsyncCaller, exchanges: LockExchanges, grant: LockGrant, on_loss: OnAsyncLoss | None
    ) -> None:
        self.name = grant.name
        self.holder = grant.holder
        self.fencing_token = grant.fencing_token
        self.slot = grant.slot
        self.lost = asyncio.Event()
        self._client = client
        self._exchanges = exchanges
        self._grant = grant
        self._on_loss = on_loss
        self._term = grant.term
        self._woken = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._body: asyncio.Task[object] | None = None
        self._cancellations = 0
        self._cancelled_body = False
        self._loss: LockLost | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the lock is lost by this process' clock, without a request; also right after the process was
        suspended. True after the block."""
        return self._term.lost(term_clock()) is not None

    def raise_if_lost(self) -> None:
        """Raise LockLost, which gives the reason, if the lock is lost."""
        if loss := self._term.lost(term_clock()):
            raise LockLost(loss.code, loss.detail, loss.status)

    async def verify(self) -> None:
        """Ask the server whether the lock is held; see `HeldLock.verify`."""
        self.raise_if_lost()
        try:
            await self._client.perform(self._exchanges.verify(self._grant, self._term.left_seconds(term_clock())))
        except (LockLost, LockNotFound) as error:
            self._term.failed(error, term_clock())
            self._woken.set()
        except RetryLater:
            self.raise_if_lost()
            raise
        self.raise_if_lost()

    def start(self) -> None:
        """Start to renew the lock for the block of the current task."""
        self._body = asyncio.current_task()
        self._cancellations = self._body.cancelling() if self._body else 0
        self._keeper = asyncio.create_task(self._keep(), name="popgate-lock")

    def stop(self) -> bool:
        """Stop renewals and cancellations. Return whether the block's task was cancelled only because of the loss. Call
        it once."""
        if self._keeper is not None:
            self._keeper.cancel()
        self._loss = self._term.lost(term_clock())
        if self._loss:
            self._tell(self._loss)
        self._term.close()
        return self._cancelled_body and self._body is not None and self._body.uncancel() <= self._cancellations

    async def end(self) -> LockLost | None:
        """Release the lock, within a few seconds; return why it was lost before, if it was.

        Raises: only CancelledError.
        """
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
        retry_seconds_max = RELEASE_SECONDS_MAX if self._loss is None else 0.0
        try:
            found = await self._client.perform(
                self._exchanges.release(self._grant, retry_seconds_max=retry_seconds_max)
            )
            self._loss = self._loss or found
        except Exception as error:  # the lock expires anyway; the block's own error matters more
            logger.warning("a lock could not be released", extra={"lock": self.name, "cause": cause_of(error)})
        return self._loss

    async def _keep(self) -> None:
        while (loss := self._term.lost(now := term_clock())) is None:
            if pause := self._term.rest_seconds(now):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._woken.wait()
            else:
                await self._renew(now)
        self._tell(loss)
        if self._on_loss == "cancel" and self._body is not None:
            self._cancelled_body = self._body.cancel()

    def _tell(self, loss: LockLost) -> None:
        """Report the loss once."""
        if self.lost.is_set():
            return
        self.lost.set()
        logger.info("a lock was lost", extra={"lock": self.name, "cause": str(loss)})
        if callable(self._on_loss):
            try:
                self._on_loss(self)
            except Exception:
                logger.exception("the on_loss callback of a lock has failed", extra={"lock": self.name})

    async def _renew(self, asked_at: float) -> None:
        seconds = self._term.answer_seconds(asked_at)
        try:
            await self._client.perform(self._exchanges.renew(self._grant, seconds))
        except Exception as error:  # only the end of the term may end the renewals
            if not isinstance(error, LockLost | LockNotFound):
                logger.warning("a lock could not be renewed", extra={"lock": self.name, "cause": cause_of(error)})
            failure = error if isinstance(error, PopgateError) else PopgateError("failed", repr(error))
            self._term.failed(failure, term_clock())
        else:
            self._term.renewed(asked_at, term_clock())


@asynccontextmanager
async def hold(
    client: _AsyncCaller,
    exchanges: Exchanges,
    name: str,
    *,
    holder: str | None,
    ttl_seconds: float,
    wait_seconds: float,
    on_loss: OnAsyncLoss | None,
) -> AsyncGenerator[AsyncHeldLock]:
    """Hold the lock as `AsyncClient.lock` documents."""
    locks = LockExchanges(exchanges, term_clock)
    grant = await client.perform(locks.acquire(name, holder or default_holder(), ttl_seconds, wait_seconds))
    lock = AsyncHeldLock(client, locks, grant, on_loss)
    try:
        lock.raise_if_lost()
        lock.start()
        yield lock
    except BaseException as error:
        cancelled_for_loss = lock.stop()
        loss = await lock.end()
        if loss and cancelled_for_loss and isinstance(error, asyncio.CancelledError):
            raise LockLost(loss.code, loss.detail, loss.status) from error
        raise
    lock.stop()
    if loss := await lock.end():
        raise LockLost(loss.code, loss.detail, loss.status)
