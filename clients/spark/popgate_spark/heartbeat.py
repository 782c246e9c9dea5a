"""Renews the leases of the batch that Spark works on, in a daemon thread of the driver's process.

The thread ends with the process: messages that Spark no longer works on become visible again when their leases end. A
batch that takes longer than `hold_seconds_max` is no longer renewed, so that a hanging query does not hold its messages
for ever.
"""

import logging
import threading
import time

from popgate_client.errors import PopgateError
from popgate_spark.options import StreamOptions
from popgate_spark.proxies import Proxies

_BEATS_PER_LEASE = 3
CLOSE_SECONDS_MAX = 5.0
"""Seconds that `close` waits for the thread, which may be waiting for a proxy that does not answer."""
_log = logging.getLogger(__name__)


class Heartbeat:
    """Renews all leases of one stream after each third of their length, from `watch` until `rest`."""

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._pause_seconds = options.leased.invisibility_seconds / _BEATS_PER_LEASE
        self._lock = threading.Lock()
        self._stream = ""
        self._epoch = 0
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def watch(self, stream: str, epoch: int) -> None:
        """Start to renew this batch, which Spark works on now."""
        with self._lock:
            if (stream, epoch) != (self._stream, self._epoch):
                self._stream, self._epoch, self._since = stream, epoch, time.monotonic()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="popgate-heartbeat", daemon=True)
                self._thread.start()

    def rest(self) -> None:
        """Renew nothing until the next `watch`, because no batch is leased."""
        with self._lock:
            self._stream = ""

    def close(self) -> None:
        """End the thread. Nothing is released; the leases expire."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS_MAX)

    def _run(self) -> None:
        # Separate connections, because the reader's may be waiting for an answer when the leases must be renewed.
        proxies: Proxies | None = None
        while not self._is_closed.wait(self._pause_seconds):
            try:
                proxies = proxies or Proxies(self._options.leased.place, retry_seconds=self._pause_seconds)
                self._beat(proxies)
            except PopgateError as error:  # the next renewal may succeed; if not, reading leases the batch again
                _log.warning("popgate: the leases could not be renewed: %s", error)
            except Exception:  # any error: if the thread ended, all later leases would expire silently
                _log.exception("popgate: the leases could not be renewed because of an error in popgate; trying again")
        if proxies is not None:
            proxies.close()

    def _beat(self, proxies: Proxies) -> None:
        with self._lock:
            stream, epoch, held_seconds = self._stream, self._epoch, time.monotonic() - self._since
        if not stream:
            return
        if held_seconds > self._options.hold_seconds_max:
            _log.error(
                "popgate: batch %d has taken longer than holdSecondsMax; its leases are not renewed any more", epoch
            )
            self._let_go(stream, epoch)
            return
        proxies.lease_stream(self._options.leased.group, stream).extend(self._options.leased.invisibility_seconds)

    def _let_go(self, stream: str, epoch: int) -> None:
        with self._lock:
            if (stream, epoch) == (self._stream, self._epoch):  # the next batch may have come meanwhile
                self._stream = ""
