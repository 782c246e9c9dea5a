"""Keeps the principals of the key file in memory, and reads the file again when it changes.

Theory of operation. Look-ups are dict look-ups. ``run`` looks at the file several times a second, in a thread of its
own. asyncio's threads also look up host names, and a revoked key must not stay valid while a name server is silent. A
file that is wrong or missing changes nothing: the known keys remain valid, until the file is right again. Otherwise a
mistake in the file would lock out every client.

    --changed--> read in a thread --right--> all look-ups use the new keys, and ``version`` grows
                                  '--wrong--> the known keys remain, ``is_stale``, one warning

A changed file is read when it has not changed between two looks, because it may be written in place, and incomplete
before. File systems record times in steps of milliseconds, so a file that has just changed may change once more without
a difference in its time. So it is read again until its last change is a few seconds ago.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import NamedTuple

from popgate.auth.key_file import FILE_BYTES_MAX, KeyFileError, KnownPrincipal, certificate_name, parse_key_file
from popgate.auth.keys import DIGEST_BYTES, digest_of, key_id_in
from popgate.domain.errors import StartupError
from popgate.domain.permissions import Caller, Principal
from popgate.ports.clock import Clock
from popgate.runtime.clocks import SystemClock
from popgate.runtime.private_files import PrivateFileError, read_private

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Seconds between two looks at the file."""
SETTLE_SECONDS = 0.1
"""Seconds for which a file must not change before it is read."""
SETTLE_LOOKS_MAX = 5
"""Maximum number of looks to wait for a file that keeps changing."""
RECENT_SECONDS = 2.0
"""A file that changed at most this many seconds before it was read is read again."""
SHOWN_PROBLEMS_MAX = 10

_NO_DIGEST = bytes(DIGEST_BYTES)


class KeyChanges(NamedTuple):
    """The ids of the keys that a change of the file has added and removed, and of those that expired.

    ``changed`` has the names of the principals that were added or removed, or whose grants, limits or certificates have
    changed.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


class _Entry(NamedTuple):
    digest: bytes
    caller: Caller


class _Known(NamedTuple):
    """The content of the file, arranged for look-ups."""

    keys: Mapping[str, _Entry]
    certificates: Mapping[str, Principal]
    principals: Mapping[str, tuple[Principal, frozenset[str]]]
    """Each principal and its certificates, by its name."""


class _Look(NamedTuple):
    """What one look at the file found. Without ``known``, ``problems`` says what is wrong with the file."""

    seal: bytes
    """Identifies the content, or the problem."""
    known: _Known | None
    problems: tuple[str, ...] = ()
    is_read: bool = True


_Mark = tuple[int, ...]
"""Device, inode, times of change and size of the file, or empty if the file is missing. A file with another mark may
have another content."""
_MISSING: _Mark = ()


class WatchedKeys:
    """The principals in a key file. After ``load``, ``changed`` is called with the ids of keys that come, go or
    expire, and the names of principals that change."""

    def __init__(
        self, file: Path, *, clock: Clock | None = None, changed: Callable[[KeyChanges], None] | None = None
    ) -> None:
        self._file = file
        self._clock = SystemClock() if clock is None else clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keys file")
        self._changed = changed
        self._known = _Known({}, {}, {})
        self._seal = b""
        self._mark = _MISSING
        """The mark of the file when it was read last."""
        self._must_read_again = False
        self._unsettled: _Mark | None = None
        """The mark of a changed file at the last look, if the file was not read then."""
        self._unsettled_looks = 0
        self._expired: frozenset[str] = frozenset()
        self._next_expiry = float("inf")
        self.version = 0
        """Grows whenever keys, certificates or permissions have changed."""
        self.is_stale = False
        """Whether the file is wrong or missing at present, so that older keys are in use."""

    # -- look-ups -------------------------------------------------------------------------------------------------

    def caller_by_key(self, key: str) -> Caller | None:
        """Return the caller that a key proves, or None if the key is not valid now.

        The time does not depend on whether the id is known, nor on how much of the secret is right.
        """
        id = key_id_in(key)
        if id is None:
            return None
        entry = self._known.keys.get(id)
        is_right = compare_digest(digest_of(key), _NO_DIGEST if entry is None else entry.digest)
        return entry.caller if entry is not None and is_right and self._is_valid(entry.caller) else None

    def caller_of_key(self, id: str) -> Caller | None:
        """Return the caller with the key of this id, or None if the key is not valid now."""
        entry = self._known.keys.get(id)
        return entry.caller if entry is not None and self._is_valid(entry.caller) else None

    def principals_by_certificate(self, names: Sequence[str]) -> list[tuple[str, Principal]]:
        """Return those names in a certificate that belong to a principal, with the principal."""
        known = self._known.certificates
        found = [(name, known.get(certificate_name(name))) for name in names]
        return [(name, principal) for name, principal in found if principal is not None]

    def _is_valid(self, caller: Caller) -> bool:
        return caller.expires_at is None or self._clock.wall() < caller.expires_at

    # -- the file -------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the file for the first time. Raises: StartupError with all that is wrong with it."""
        self._mark = self._mark_of_file()
        look = self._read()
        if look.known is None:
            raise StartupError("the keys can't be used:\n" + "\n".join(f"  {problem}" for problem in look.problems))
        self._must_read_again = self._is_recent()
        self._seal, self._known = look.seal, look.known
        self.version += 1
        self._expired = self._expired_now()

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS if self._unsettled is None else SETTLE_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Read the file if it has changed, and report the keys that have expired. Never fails."""
        look = await asyncio.get_running_loop().run_in_executor(self._thread, self._read_if_changed)
        if look is not None and look.seal != self._seal:
            self._seal = look.seal
            if look.known is None:
                self.is_stale = True
                shown = "; ".join(look.problems[:SHOWN_PROBLEMS_MAX])
                _log.warning("the key file is wrong; the keys that were known remain valid", extra={"reason": shown})
            else:
                self._use(look.known)
        if self._clock.wall() >= self._next_expiry:
            self._report_expired()

    def _read_if_changed(self) -> _Look | None:
        """Return what is new in the file, or None if it has not changed, or is probably being written."""
        mark = self._mark_of_file()
        if mark == self._mark and not self._must_read_again:
            self._unsettled, self._unsettled_looks = None, 0
            return None
        if mark not in (self._mark, self._unsettled) and self._unsettled_looks < SETTLE_LOOKS_MAX:
            self._unsettled = mark
            self._unsettled_looks += 1
            return None
        self._unsettled, self._unsettled_looks, self._mark = None, 0, mark
        look = self._read()
        self._must_read_again = not look.is_read or self._is_recent()
        return look

    def _mark_of_file(self) -> _Mark:
        try:
            status = self._file.stat()
        except (OSError, ValueError):
            return _MISSING
        # a change of the owner or the mode changes st_ctime
        return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)

    def _is_recent(self) -> bool:
        return self._mark != _MISSING and abs(self._clock.wall() - self._mark[3] / 1e9) < RECENT_SECONDS

    def _read(self) -> _Look:
        try:
            content = read_private(self._file, bytes_max=FILE_BYTES_MAX)
        except PrivateFileError as error:
            return _Look(os.fsencode(str(error)), None, (str(error),), is_read=False)
        seal = sha256(content).digest()
        if seal == self._seal:
            return _Look(seal, None)
        try:
            return _Look(seal, _arranged(parse_key_file(content)))
        except KeyFileError as error:
            return _Look(seal, None, tuple(f"{self._file}: {problem}" for problem in error.problems))

    # -- changes --------------------------------------------------------------------------------------------------

    def _use(self, known: _Known) -> None:
        before, self._known = self._known, known
        self.is_stale = False
        if known == before:
            return
        self.version += 1
        added = tuple(id for id, entry in known.keys.items() if before.keys.get(id, _NOTHING).digest != entry.digest)
        removed = tuple(id for id, entry in before.keys.items() if known.keys.get(id, _NOTHING).digest != entry.digest)
        names = {**before.principals, **known.principals}
        changed = tuple(name for name in names if before.principals.get(name) != known.principals.get(name))
        fields = {"added": len(added), "removed": len(removed), "changed": len(changed)}
        _log.info("the key file was read", extra=fields)
        expired = self._expired_now()
        self._report(KeyChanges(added, removed, tuple(sorted(expired - self._expired)), changed))
        self._expired = expired

    def _report_expired(self) -> None:
        expired = self._expired_now()
        self._report(KeyChanges(expired=tuple(sorted(expired - self._expired))))
        self._expired = expired

    def _expired_now(self) -> frozenset[str]:
        """Return the ids of expired keys, and note when the next one expires."""
        now = self._clock.wall()
        times = {id: entry.caller.expires_at for id, entry in self._known.keys.items()}
        self._next_expiry = min((at for at in times.values() if at is not None and at > now), default=float("inf"))
        return frozenset(id for id, at in times.items() if at is not None and at <= now)

    def _report(self, changes: KeyChanges) -> None:
        if self._changed is not None and any(changes):
            self._changed(changes)


_NOTHING = _Entry(b"", Caller(principal=Principal(name=""), credential=""))


def _arranged(principals: Sequence[KnownPrincipal]) -> _Known:
    keys = {
        key.id: _Entry(
            key.digest,
            Caller(principal=one.principal, credential=key.id, expires_at=key.expires, proof=key.digest),
        )
        for one in principals
        for key in one.keys
    }
    return _Known(
        keys,
        {name: one.principal for one in principals for name in one.certificates},
        {one.principal.name: (one.principal, frozenset(one.certificates)) for one in principals},
    )
