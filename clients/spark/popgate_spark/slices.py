"""Reads one slice of a lease group on an executor, with the same result each time.

A slice is read completely before its first row is passed on, so that an interrupted answer can be requested again and
no row is seen twice. If the leases have expired (the driver was suspended for longer than they last), the same messages
are leased again. If other clients got some of them meanwhile, or all were released, the task and its repeats fail,
because a batch must not differ between two tasks. Spark's next attempt at the whole batch plans it again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from popgate_client.errors import LeaseGroupAcked, LeaseGroupExpired, LeaseGroupNotFound
from popgate_client.lease_groups import FORM_NOTHING, FORM_SECONDS
from popgate_client.wire import Request, lease_group_path
from popgate_spark.columns import record_batches
from popgate_spark.errors import BatchUnavailable
from popgate_spark.options import LeasedOptions
from popgate_spark.proxies import ARROW, Proxies

RENEWALS_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSlice(InputPartition):
    """One task's part of a batch. `lost`: messages that the whole batch had lost when it was planned."""

    stream: str
    epoch: int
    number: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReader:
    """Reads slices of one subscription. Spark sends it to the executors."""

    options: LeasedOptions
    schema: StructType

    def read(self, one: LeasedSlice) -> Iterator[Any]:
        """Return the record batches of a slice: the same rows in the same order each time.

        Raises: BatchUnavailable; RetryLater if no proxy answers.
        """
        yield from record_batches(self._fetch(one), self.schema)

    def _fetch(self, one: LeasedSlice) -> bytes:
        try:
            for _ in range(RENEWALS_MAX):
                content = self._content(one)
                self._hold(one)
                if content is not None:
                    return content
        except (LeaseGroupAcked, LeaseGroupNotFound) as error:
            raise BatchUnavailable(
                f"popgate: batch {one.epoch} of stream {one.stream} can't be read any more: {error.detail}"
            ) from None
        raise BatchUnavailable(
            f"popgate: the leases of batch {one.epoch} of stream {one.stream} end while it is read; set "
            "invisibilitySeconds higher"
        )

    def _content(self, one: LeasedSlice) -> bytes | None:
        """Return the slice's content; None if its leases have expired."""
        path = lease_group_path(self.options.place.topic, self.options.group, one.stream, str(one.epoch), "messages")
        request = Request(method="GET", path=f"{path}?slice={one.number}", silence_seconds=FORM_SECONDS)
        with Proxies(self.options.place, accept=ARROW, first=one.number) as proxies:
            try:
                return proxies.perform(proxies.exchanges.repeatable(request)).content
            except LeaseGroupExpired:
                return None

    def _hold(self, one: LeasedSlice) -> None:
        """Lease the batch again if necessary, and check that it has lost no messages since it was planned.

        This is also called after a successful read, because another task may have leased the batch again without the
        messages that other clients got.
        """
        with Proxies(self.options.place, first=one.number) as proxies:
            stream = proxies.lease_stream(self.options.group, one.stream)
            leased = stream.lease(one.epoch, FORM_NOTHING, invisibility_seconds=self.options.invisibility_seconds)
        if leased.lost != one.lost:
            raise BatchUnavailable(
                f"popgate: {leased.lost - one.lost} messages of batch {one.epoch} of stream {one.stream} went to "
                "another consumer while it was read; start the query again: it then reads the batch without them"
            )
