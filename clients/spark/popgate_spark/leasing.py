"""The driver's part of a streaming query: acks, leases and finds again the batches of one stream.

Theory of operation (docs/spark.md). Each epoch is one lease group and one micro-batch. Spark calls
`latestOffset(start)` only when its commit log has `start`, whose batch the sink then has: so that call acks everything
through `start`. Spark calls `commit` one batch late, and never for the last one, so it is only a second chance to ack.
A batch that Spark replays is found again by its epoch, with the same messages. A new batch may only be formed if
Spark's offset log can't have it yet.

Owns this process' connections, heartbeat and budget. Nothing here is ever pickled.
"""

import logging
import time
import uuid
from dataclasses import dataclass
from typing import TypedDict

from popgate_client.errors import (
    Conflict,
    GroupNotFound,
    LeaseGroupAcked,
    LeaseGroupNotFound,
    TooManyInFlight,
)
from popgate_client.lease_groups import FORM_NOTHING, LeaseGroup, LeaseStream
from popgate_client.wire import JsonObject, subscription_path
from popgate_spark.errors import BatchUnavailable
from popgate_spark.heartbeat import Heartbeat
from popgate_spark.options import StreamOptions
from popgate_spark.proxies import Proxies

IDLE_PAUSE_SECONDS, IDLE_PAUSE_SECONDS_MAX = 0.05, 0.5
"""First and maximum delay in seconds of an empty answer, because Spark asks an idle source a hundred times a second;
the delay doubles each time."""
DRAIN_PATIENCE_SECONDS = 10.0
"""Seconds for which a drain asks again for messages that are ready but were not leased, before it ends."""
CONFLICTS_MAX = 20
CONFLICT_PAUSE_SECONDS = 0.5
_REMEDY = "start the query with another checkpoint and streamId, or set onUnknownGroup to empty"
_log = logging.getLogger(__name__)


class Offset(TypedDict):
    """A position that Spark keeps in its offset log: the batch of this epoch is the last one."""

    stream: str
    epoch: int


START: Offset = {"stream": "", "epoch": 0}


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The batch that Spark must read for an offset, in `slices` parts; `lost` messages went to other consumers."""

    slices: int
    lost: int


_EMPTY = PlannedBatch(0, 0)


class BatchLeases:
    """Manages the batches of one query, in the driver's long-lived process."""

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._proxies = Proxies(options.leased.place)
        self._heartbeat = Heartbeat(options)
        self._pause_seconds = IDLE_PAUSE_SECONDS
        self._budget: int | None = None
        self._is_checked = False
        self._planned: tuple[Offset, PlannedBatch] | None = None
        self._acked = START

    def limit_to_what_is_there(self) -> None:
        """Limit all further leases to the number of messages that are ready now."""
        try:
            self._budget = self._ready()
        except GroupNotFound:
            self._budget = 1  # the first lease creates the group, which gets the messages published from then on

    def ack(self, offset: Offset) -> None:
        """Settle every batch through this one, because the sink has them. A repeat makes no request."""
        if offset in (START, self._acked):
            return
        acked = self._stream(offset).ack(offset["epoch"])
        if acked.lost:
            _log.warning(
                "popgate: %d messages of batches through %d went to another consumer before they were acked, but are "
                "also in the sink",
                acked.lost,
                offset["epoch"],
            )
        self._acked = offset

    def lease(self, start: Offset, messages_max: int) -> Offset:
        """Lease the next batch, of at most `messages_max` messages; return its offset, or `start` if nothing is
        ready."""
        if self._budget is not None:
            messages_max = min(messages_max, self._budget)
        following: Offset = {
            "stream": start["stream"] or self._options.stream_id or uuid.uuid4().hex,
            "epoch": start["epoch"] + 1,
        }
        held = 0
        if not self._is_checked:
            found = self._check(start, following)
            self._is_checked = True
            if found is not None:  # an earlier driver leased it, or began to: it belongs to this query
                messages_max = max(messages_max, 1)
                held = int(found["count"]) if found["remaining_seconds"] > 0 else 0
        formed = self._form(following, messages_max) if messages_max > 0 else None
        if formed is None:
            self._heartbeat.rest()
            if self._budget is None:
                time.sleep(self._pause_seconds)
                self._pause_seconds = min(2 * self._pause_seconds, IDLE_PAUSE_SECONDS_MAX)
            return start
        self._pause_seconds = IDLE_PAUSE_SECONDS
        offset, group = formed
        if self._budget is not None:  # messages that an earlier driver held were leased, not ready
            self._budget -= max(0, group.count - held)
        self._take(offset, group)
        return offset

    def plan(self, end: Offset) -> PlannedBatch:
        """Return the batch to read for this offset; its leases are valid when this returns."""
        if self._planned is not None and self._planned[0] == end:
            return self._planned[1]
        group = self._find_again(end)
        return _EMPTY if group is None else self._take(end, group)

    def close(self) -> None:
        """End connections and heartbeat. Nothing is released: a batch that Spark has planned must be found again."""
        self._heartbeat.close()
        self._proxies.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _stream(self, offset: Offset) -> LeaseStream:
        return self._proxies.lease_stream(self._options.leased.group, offset["stream"])

    def _ready(self) -> int:
        """Return how many messages could be leased now, as far as the proxy knows."""
        path = subscription_path(self._options.leased.place.topic, self._options.leased.group)
        state = self._proxies.perform(self._proxies.exchanges.read(path))
        return int(state["ready"])

    def _check(self, start: Offset, following: Offset) -> JsonObject | None:
        """Return the lease group of the next batch if it already exists, complete or forming. Reject or release groups
        that this checkpoint does not know: another checkpoint has continued this stream, and they would be acked
        without having been read."""
        if not start["stream"] and not self._options.stream_id:
            return None  # the stream is new
        groups = self._groups(following)
        later = [epoch for epoch, one in groups.items() if epoch > following["epoch"] and one["state"] != "forming"]
        if later:
            self._complain(
                f"the checkpoint ends with batch {start['epoch']}, but batch {max(later)} of stream "
                f"{following['stream']} is leased: the checkpoint is lost or old, or another query uses the stream"
            )
            self._stream(following).release(start["epoch"])
            return None
        return groups.get(following["epoch"])

    def _form(self, offset: Offset, messages_max: int) -> tuple[Offset, LeaseGroup] | None:
        """Lease this batch, new or found again; None if nothing is ready. The returned offset is a later one only if
        the epoch was acked and the user wants to continue."""
        patience_ends = time.monotonic() + DRAIN_PATIENCE_SECONDS
        conflicts = 0
        while True:
            try:
                group = self._put(offset, messages_max)
            except LeaseGroupAcked:
                self._complain(
                    f"batch {offset['epoch']} of stream {offset['stream']} was acked before: the checkpoint is lost or "
                    "old, or another query uses the stream"
                )
                offset = {"stream": offset["stream"], "epoch": 2 * offset["epoch"]}
            except TooManyInFlight:
                return None
            except Conflict:  # an earlier driver may still be forming it
                conflicts += 1
                if conflicts > CONFLICTS_MAX:
                    raise
                time.sleep(CONFLICT_PAUSE_SECONDS)
            else:
                if group.count or group.lost:
                    return offset, group
                if self._budget is None or time.monotonic() > patience_ends or not self._ready():
                    return None
                time.sleep(IDLE_PAUSE_SECONDS_MAX)

    def _find_again(self, end: Offset) -> LeaseGroup | None:
        """Return the batch that Spark replays, with its leases renewed. It must never be formed again: the sink may
        have the original batch, and would then skip messages that are acked later."""
        try:
            return self._put(end, FORM_NOTHING)
        except (LeaseGroupAcked, LeaseGroupNotFound):
            self._complain(
                f"batch {end['epoch']} of stream {end['stream']} is not leased any more: it was acked or given up"
            )
            return None

    def _put(self, offset: Offset, messages_max: int) -> LeaseGroup:
        options = self._options.leased
        return self._stream(offset).lease(
            offset["epoch"], messages_max, options.partitions, options.invisibility_seconds
        )

    def _take(self, offset: Offset, group: LeaseGroup) -> PlannedBatch:
        if group.lost:
            _log.warning(
                "popgate: %d messages of batch %d went to another consumer after its leases had expired",
                group.lost,
                offset["epoch"],
            )
        batch = PlannedBatch(group.slices, group.lost)
        self._planned = offset, batch
        self._heartbeat.watch(offset["stream"], offset["epoch"])
        return batch

    def _groups(self, offset: Offset) -> dict[int, JsonObject]:
        """Return the stream's batches that are not acked, by epoch."""
        try:
            groups = self._stream(offset).groups()
        except GroupNotFound:
            return {}
        return {int(one["epoch"]): one for one in groups}

    def _complain(self, what: str) -> None:
        """Raise BatchUnavailable, or only log if the user wants to continue."""
        if self._options.on_unknown_group == "fail":
            raise BatchUnavailable(f"popgate: {what}; {_REMEDY}")
        _log.warning("popgate: %s; continuing (onUnknownGroup is empty)", what)
