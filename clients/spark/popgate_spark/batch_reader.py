"""`spark.read.format("popgate")`: reads one batch of the ready messages, leased until the user acks it.

Spark computes a DataFrame again at every action, and repeats failed tasks. So reading never acks: the batch is a lease
group named by `batchId`, with the same messages at each read, and `ack_batch` settles it once the results are safe. A
batch without a `batchId` can't be acked: its messages become visible again when the leases end.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from popgate_client.errors import LeaseGroupAcked
from popgate_client.lease_groups import LeaseGroupsAcked
from popgate_spark.columns import check_schema
from popgate_spark.errors import BatchUnavailable, OptionInvalid, told_in_one_line
from popgate_spark.options import BatchOptions, Options
from popgate_spark.proxies import Proxies
from popgate_spark.slices import LeasedSlice, SliceReader

EPOCH = 1
"""The epoch of a batch: each batch is a stream with this single epoch."""


class PopgateBatchReader(DataSourceReader):
    """Leases at most `maxMessagesPerBatch` ready messages at the first action."""

    def __init__(self, options: BatchOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._slices = SliceReader(options=options.leased, schema=schema)

    def partitions(self) -> list[InputPartition]:
        """Lease the batch, or renew the leases of the same batch. Spark calls this on the driver at each action."""
        options, leased = self._options, self._options.leased
        with told_in_one_line(), Proxies(leased.place) as proxies:
            stream = proxies.lease_stream(leased.group, options.batch_id)
            try:
                group = stream.lease(EPOCH, leased.messages_max, leased.partitions, leased.invisibility_seconds)
            except LeaseGroupAcked:
                raise BatchUnavailable(
                    f"popgate: batch {options.batch_id} was acked; name another batchId to read newer messages"
                ) from None
        return [
            LeasedSlice(stream=options.batch_id, epoch=EPOCH, number=number, lost=group.lost)
            for number in range(group.slices if group.count else 0)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one slice. Spark calls this on an executor."""
        if isinstance(partition, LeasedSlice):  # Spark adds an empty partition if there is none
            yield from self._slices.read(partition)


def ack_batch(**options: str) -> LeaseGroupsAcked:
    """Settle the batch that was read with these options; only `url`, `topic`, `group` and `batchId` matter.

    Call this once the results are safe. A second call has no effect. `lost` messages went to another consumer after
    the leases had ended. Raises: OptionInvalid, PopgateError.
    """
    read = _named(options)
    with Proxies(read.leased.place) as proxies:
        return proxies.lease_stream(read.leased.group, read.batch_id).ack(EPOCH)


def release_batch(**options: str) -> int:
    """Release the batch: its messages become visible again. Return how many. Raises: OptionInvalid, PopgateError."""
    read = _named(options)
    with Proxies(read.leased.place) as proxies:
        return proxies.lease_stream(read.leased.group, read.batch_id).release(EPOCH - 1)


def _named(options: dict[str, str]) -> BatchOptions:
    read = Options(options).batch("")
    if not read.batch_id:
        raise OptionInvalid("batchId", 'is missing; name the batch with .option("batchId", ...) before you read it')
    return read
