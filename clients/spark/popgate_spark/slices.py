"""Reading one slice of a lease group: what executors do, over and over the same way.

A slice is read whole before its first row is given on, so that an answer that breaks off is asked for again and no row
is ever seen twice. Where the leases ran out (the driver stood still for longer than they last) the same messages are
leased again; where some of them went elsewhere meanwhile, or all were given back, the task fails, as does each repeat
of it: a batch must not differ between two tasks. Spark's next attempt at the whole batch plans it anew.
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
    """One task's part of a batch. `lost` is what the whole batch had lost when it was planned."""

    stream: str
    epoch: int
    number: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReader:
    """Reads slices of one subscription; goes to the executors."""

    options: LeasedOptions
    schema: StructType

    def read(self, one: LeasedSlice) -> Iterator[Any]:
        """The record batches of a slice: the same rows in the same order each time.

        Raises: BatchUnavailable; RetryLater where no proxy answered.
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
        """None where leases have run out."""
        path = lease_group_path(self.options.place.topic, self.options.group, one.stream, str(one.epoch), "messages")
        request = Request(method="GET", path=f"{path}?slice={one.number}", silence_seconds=FORM_SECONDS)
        with Proxies(self.options.place, accept=ARROW, first=one.number) as proxies:
            try:
                return proxies.perform(proxies.exchanges.repeatable(request)).content
            except LeaseGroupExpired:
                return None

    def _hold(self, one: LeasedSlice) -> None:
        """Lease the batch again, where that is needed, and see that it has lost nothing since it was planned.

        Asked after what was read as well: another task may have leased it again, without what had gone elsewhere.
        """
        with Proxies(self.options.place, first=one.number) as proxies:
            stream = proxies.lease_stream(self.options.group, one.stream)
            leased = stream.lease(one.epoch, FORM_NOTHING, invisibility_seconds=self.options.invisibility_seconds)
        if leased.lost != one.lost:
            raise BatchUnavailable(
                f"popgate: {leased.lost - one.lost} messages of batch {one.epoch} of stream {one.stream} went to "
                "another consumer while it was read; start the query again: it reads the batch anew, without them"
            )
