"""Keeps the public keys of an OpenID provider in memory, and renews them.

Theory of operation. ``run`` is the only task that fetches, so there is never more than one request to the provider. It
fetches every few minutes, and when a token names an unknown key. Because anyone can send such tokens, they cause at
most one fetch in ``UNKNOWN_KEY_SECONDS``, at most ``WAITING_MAX`` of them wait for it, and none waits or causes a fetch
while the provider fails. Tokens with known keys never wait.

    no keys --fetched--> keys --fetched--> other keys: those that are gone are withdrawn
       |                  |
       '--fails--         '--fails--> the same keys, until they are ``KEEP_SECONDS`` old --> no keys
          RetryLater

If a fetch has failed, an unknown key may be a new one. Then the client is asked to try again later.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from popgate.auth.key_set import KeySet, KeySetError, ProviderKey, parse_key_set
from popgate.auth.provider_client import FETCH_SECONDS, ProviderError
from popgate.domain.errors import RetryLater
from popgate.ports.clock import Clock
from popgate.runtime.clocks import SystemClock

_log = logging.getLogger(__name__)

RENEW_SECONDS = 300.0
"""Maximum seconds from a fetch to the end of the next one. A key that the provider withdraws remains valid so long."""
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 1.0, 60.0
"""Bounds of the seconds between a failed fetch and the next one."""
UNKNOWN_KEY_SECONDS = 5.0
"""Minimum seconds between two fetches because of unknown keys."""
KEEP_SECONDS = 24 * 3600.0
"""Maximum age of the keys if the provider can't be reached, in seconds."""
WAIT_SECONDS = FETCH_SECONDS + 2
"""Maximum seconds for which a token waits for a fetch."""
FETCHES_MAX = 2
"""Maximum number of fetches for which a token waits: the key may be published while one is running."""
WAITING_MAX = 128
"""Maximum number of tokens that wait for a fetch. A request that waits takes memory even if its client has gone."""
WITHDRAWN_MAX = 256
"""Maximum number of withdrawn keys that are remembered."""
LOGGED_IDS_MAX = 10


class ProviderKeys:
    """The keys of one provider. ``fetch`` returns its set of keys. ``run`` must run as long as keys are used."""

    def __init__(
        self, fetch: Callable[[], Awaitable[bytes]], *, clock: Clock | None = None, chance: random.Random | None = None
    ) -> None:
        self._fetch = fetch
        self._clock = SystemClock() if clock is None else clock
        self._chance = random.Random() if chance is None else chance
        self._keys: KeySet | None = None
        self._fetched_at = 0.0
        """When the fetch of the present keys began (monotonic)."""
        self._failures = 0
        """Number of fetches that have failed since the last one that succeeded."""
        self._withdrawn: dict[str, None] = {}
        """The thumbprints of withdrawn keys, oldest first."""
        self._is_due = True
        """Whether a fetch is running or begins now."""
        self._asked_at = float("-inf")
        self._waiting = 0
        self._wake = asyncio.Event()
        self._fetch_ended = asyncio.Event()
        """Set when the present or the next fetch ends, and then replaced."""
        self.version = 0
        """Grows whenever a key is no longer valid."""

    def is_withdrawn(self, thumbprint: str) -> bool:
        """Return whether the provider has published the key earlier, but does not do so any more."""
        return thumbprint in self._withdrawn

    async def key(self, id: str, algorithm: str) -> ProviderKey | None:
        """Return the key with this id for this algorithm, or None if the provider has no such key.

        Raises: RetryLater if this is not known, because the provider can't be reached or too many tokens wait.
        """
        for fetches in range(FETCHES_MAX + 1):
            self._forget_old_keys()
            found = None if self._keys is None else self._keys.get((id, algorithm))
            if found is not None:
                return found
            if fetches == FETCHES_MAX or not await self._next_fetch():
                break
        if self._keys is None or self._failures or self._waiting >= WAITING_MAX:
            raise RetryLater(
                "the keys of the OpenID provider can't be fetched at present", retry_after_seconds=UNKNOWN_KEY_SECONDS
            )
        return None

    async def _next_fetch(self) -> bool:
        """Wait until the fetch that runs, or a new one, has ended. Return False if the token may not wait."""
        if self._failures or self._waiting >= WAITING_MAX:
            return False
        if not self._is_due:
            now = self._clock.monotonic()
            if now - self._asked_at < UNKNOWN_KEY_SECONDS:
                return False
            self._asked_at = now
            self._is_due = True
            self._wake.set()
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._fetch_ended.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    # -- fetches --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fetch the keys now, and renew them until cancelled."""
        while True:
            self._is_due = True
            self._wake.clear()
            try:
                await self._renew()
            finally:
                self._is_due = False
                ended, self._fetch_ended = self._fetch_ended, asyncio.Event()
                ended.set()
            try:
                async with asyncio.timeout(pause_seconds(self._failures, self._chance)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _renew(self) -> None:
        began = self._clock.monotonic()
        try:
            keys = parse_key_set(await self._fetch())
        except (ProviderError, KeySetError) as error:
            self._failures += 1
            if self._failures == 1:
                _log.warning(
                    "the keys of the OpenID provider can't be fetched; those that are known remain valid",
                    extra={"reason": str(error), "known": len(self._keys or ())},
                )
            self._forget_old_keys()
            return
        if self._failures:
            _log.info("the keys of the OpenID provider were fetched again", extra={"failures": self._failures})
        self._failures, self._fetched_at = 0, began
        self._use(keys)

    def _use(self, keys: KeySet) -> None:
        before, self._keys = self._keys or {}, keys
        if keys == before and keys:
            return
        if not keys:
            _log.warning("the OpenID provider has published no key that popgate can use (RS256, ES256 or EdDSA)")
        present = {key.thumbprint for key in keys.values()}
        for thumbprint in present:
            self._withdrawn.pop(thumbprint, None)
        gone = {key.thumbprint for key in before.values()} - present
        self._withdrawn.update(dict.fromkeys(gone))
        for oldest in [*self._withdrawn][:-WITHDRAWN_MAX]:
            del self._withdrawn[oldest]
        if any(keys.get(name) != key for name, key in before.items()):
            self.version += 1
        ids = sorted({id for id, _ in keys})[:LOGGED_IDS_MAX]
        _log.info("the keys of the OpenID provider have changed", extra={"ids": ids, "withdrawn": len(gone)})

    def _forget_old_keys(self) -> None:
        if self._keys is not None and self._clock.monotonic() - self._fetched_at > KEEP_SECONDS:
            _log.error("the OpenID provider could not be reached for a day; its tokens are no longer accepted")
            self._keys = None
            self.version += 1


def pause_seconds(failures: int, chance: random.Random) -> float:
    """Return the seconds until the next fetch, after this number of failures in succession."""
    if not failures:
        return RENEW_SECONDS * chance.uniform(0.8, 0.97)  # the rest is for the fetch itself
    longest = min(RETRY_SECONDS_MAX, RETRY_SECONDS_MIN * float(1 << min(failures, 10)))
    return longest * chance.uniform(0.5, 1.0)
