"""Keeps the leases of the batch that Spark is working on: a daemon thread of the driver's process.

It dies with the process, as it must: what nobody works on any more becomes visible again when its leases end. A batch
that takes longer than `hold_seconds_max` is let go of, so that a query that hangs does not hold its messages for ever.
"""

import logging
import threading
import time

from popgate_client.errors import PopgateError
from popgate_spark.options import StreamOptions
from popgate_spark.proxies import Proxies

_BEATS_PER_LEASE = 3
CLOSE_SECONDS_MAX = 5.0
"""A renewal may be waiting for a proxy that does not answer."""
_log = logging.getLogger(__name__)


class Heartbeat:
    """Renews all leases of one stream, each third of their length, from `watch` on until `rest`."""

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
        """Spark works on this batch from now on."""
        with self._lock:
            if (stream, epoch) != (self._stream, self._epoch):
                self._stream, self._epoch, self._since = stream, epoch, time.monotonic()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="popgate-heartbeat", daemon=True)
                self._thread.start()

    def rest(self) -> None:
        """Nothing is leased."""
        with self._lock:
            self._stream = ""

    def close(self) -> None:
        """End the thread. Nothing is given back: the leases end by themselves."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS_MAX)

    def _run(self) -> None:
        # Connections of its own: the reader's may be waiting for an answer just when the leases have to be renewed.
        proxies: Proxies | None = None
        while not self._is_closed.wait(self._pause_seconds):
            try:
                proxies = proxies or Proxies(self._options.leased.place, retry_seconds=self._pause_seconds)
                self._beat(proxies)
            except PopgateError as error:  # the next one may come through; if not, reading leases again
                _log.warning("popgate: the leases could not be renewed: %s", error)
            except Exception:  # whatever it is: a thread that ended would let all later leases run out in silence
                _log.exception(
                    "popgate: the leases could not be renewed, which is a fault of popgate; it is tried again"
                )
        if proxies is not None:
            proxies.close()

    def _beat(self, proxies: Proxies) -> None:
        with self._lock:
            stream, epoch, held_seconds = self._stream, self._epoch, time.monotonic() - self._since
        if not stream:
            return
        if held_seconds > self._options.hold_seconds_max:
            _log.error(
                "popgate: batch %d has been worked on for more than holdSecondsMax, its leases are let go", epoch
            )
            self._let_go(stream, epoch)
            return
        proxies.lease_stream(self._options.leased.group, stream).extend(self._options.leased.invisibility_seconds)

    def _let_go(self, stream: str, epoch: int) -> None:
        with self._lock:
            if (stream, epoch) == (self._stream, self._epoch):  # the next batch may have come meanwhile
                self._stream = ""
