"""A lock that a `with` block holds: renewed while the block runs, and given up when it can't be trusted.
`async_held_lock` is its asyncio twin.

Each held lock has two threads. One renews it, and may hang as long as the network does; the other only watches the
clock, so that it notices the end in time. Both are daemon threads: a process that ends does not wait for them.
"""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from popgate_client.errors import LockLost, LockNotFound, PopgateError, RetryLater
from popgate_client.exchange import Exchange, Exchanges
from popgate_client.facts import FactLogger, cause_of
from popgate_client.lock_terms import term_clock
from popgate_client.locks import RELEASE_SECONDS_MAX, LockExchanges, LockGrant, default_holder
from popgate_client.wire import T

logger = FactLogger(__name__)

ON_LOSS_SECONDS_MAX = 5.0

OnLoss: TypeAlias = Callable[["HeldLock"], object]


class _Caller(Protocol):
    def perform(self, exchange: Exchange[T]) -> T: ...


class HeldLock:
    """A lock inside its block, from `Client.lock`. Several threads may use it.

    `fencing_token` grows with each holder: the protected resource must refuse a token lower than one that it has seen.
    `lost` is an event to wait for: it is set as soon as the lock is lost or can't be trusted any more.
    """

    def __init__(self, client: _Caller, exchanges: LockExchanges, grant: LockGrant, on_loss: OnLoss | None) -> None:
        self.name = grant.name
        self.holder = grant.holder
        self.fencing_token = grant.fencing_token
        self.slot = grant.slot
        self.lost = threading.Event()
        self._client = client
        self._exchanges = exchanges
        self._grant = grant
        self._on_loss = on_loss
        self._term = grant.term
        self._process = os.getpid()
        self._ended = False
        self._changed = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="popgate-lock-watch", daemon=True)

    @property
    def is_lost(self) -> bool:
        """Whether the lock is lost by this process' clock, without a request; also right after the process was
        suspended. True after the block, and in a forked child."""
        return self._loss() is not None

    def raise_if_lost(self) -> None:
        """Raise LockLost, which gives the reason, if the lock is lost."""
        if loss := self._loss():
            raise LockLost(loss.code, loss.detail, loss.status)

    def verify(self) -> None:
        """Ask the server whether the lock is held, before a step that can't be undone. It may still be lost right
        afterwards.

        Raises: LockLost; RetryLater if the server can't say; ServerFault if the answer is not one of popgate.
        """
        self.raise_if_lost()
        try:
            self._client.perform(self._exchanges.verify(self._grant, self._term.left_seconds(term_clock())))
        except (LockLost, LockNotFound) as error:
            self._fail(error)
        except RetryLater:
            self.raise_if_lost()
            raise
        self.raise_if_lost()

    def start(self) -> None:
        """Start to renew the lock."""
        self._watcher.start()
        threading.Thread(target=self._renew, name="popgate-lock-renewals", daemon=True).start()

    def end(self) -> LockLost | None:
        """Release the lock, within a few seconds; return why it was lost before, if it was. Raises nothing.

        Also waits up to `ON_LOSS_SECONDS_MAX` for `on_loss`: a thread that still writes when the interpreter ends
        would crash it. A forked child releases nothing.
        """
        if not self._is_here:
            return None
        with self._changed:
            loss = self._loss()
            self._ended = True
            self._term.close()
            self._changed.notify_all()
        retry_seconds_max = RELEASE_SECONDS_MAX if loss is None else 0.0
        try:
            found = self._client.perform(self._exchanges.release(self._grant, retry_seconds_max=retry_seconds_max))
            loss = loss or found
        except Exception as error:  # the lock expires anyway; the block's own error matters more
            logger.warning("a lock could not be released", extra={"lock": self.name, "cause": cause_of(error)})
        if self._watcher.ident is not None:
            self._watcher.join(ON_LOSS_SECONDS_MAX)
        return loss

    @property
    def _is_here(self) -> bool:
        """Whether this is the process that acquired the lock; a forked child has no thread that renews it."""
        return self._process == os.getpid()

    def _loss(self) -> LockLost | None:
        """Return why the lock is lost; the first call that finds this notifies all waiting threads."""
        if not self._is_here:
            return LockLost("lock_lost", "the process that this one was forked from holds the lock")
        with self._changed:
            loss = self._term.lost(term_clock())
            if loss is not None and not self._ended and not self.lost.is_set():
                self.lost.set()
                self._changed.notify_all()
            return loss

    def _fail(self, error: PopgateError) -> None:
        with self._changed:
            self._term.failed(error, term_clock())
            self._loss()

    def _watch(self) -> None:
        with self._changed:
            while not self._ended and self._loss() is None:
                self._changed.wait(max(0.0, self._term.ends_at - term_clock()))
        if not self.lost.is_set():
            return
        logger.info("a lock was lost", extra={"lock": self.name, "cause": str(self._loss())})
        if self._on_loss is not None:
            try:
                self._on_loss(self)
            except Exception:
                logger.exception("the on_loss callback of a lock has failed", extra={"lock": self.name})

    def _renew(self) -> None:
        while self._is_due():
            asked_at = term_clock()
            try:
                self._client.perform(self._exchanges.renew(self._grant, self._term.answer_seconds(asked_at)))
            except Exception as error:  # only the end of the term may end the renewals
                if not self._ended and not isinstance(error, LockLost | LockNotFound):
                    logger.warning("a lock could not be renewed", extra={"lock": self.name, "cause": cause_of(error)})
                self._fail(error if isinstance(error, PopgateError) else PopgateError("failed", repr(error)))
            else:
                with self._changed:
                    self._term.renewed(asked_at, term_clock())

    def _is_due(self) -> bool:
        """Wait for the time of the next renewal; False if there is none any more."""
        with self._changed:
            while not self._ended and self._loss() is None:
                pause = self._term.rest_seconds(term_clock())
                if not pause:
                    return True
                self._changed.wait(pause)
        return False


@contextmanager
def hold(
    client: _Caller,
    exchanges: Exchanges,
    name: str,
    *,
    holder: str | None,
    ttl_seconds: float,
    wait_seconds: float,
    on_loss: OnLoss | None,
) -> Generator[HeldLock]:
    """Hold the lock as `Client.lock` documents."""
    locks = LockExchanges(exchanges, term_clock)
    grant = client.perform(locks.acquire(name, holder or default_holder(), ttl_seconds, wait_seconds))
    lock = HeldLock(client, locks, grant, on_loss)
    try:
        lock.raise_if_lost()
        lock.start()
        yield lock
    except BaseException:
        lock.end()
        raise
    if loss := lock.end():
        raise LockLost(loss.code, loss.detail, loss.status)
