"""popgate on Spark: a streaming source, a sink, and the jobs that read the delivery journal.

The names below are imported on first use, so that the journal's schema can be read without Spark.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popgate_spark.batch_reader import ack_batch as ack_batch
    from popgate_spark.batch_reader import release_batch as release_batch
    from popgate_spark.source import PopgateDataSource as PopgateDataSource

__all__ = ["PopgateDataSource", "ack_batch", "release_batch"]

_MODULES = {
    "PopgateDataSource": "popgate_spark.source",
    "ack_batch": "popgate_spark.batch_reader",
    "release_batch": "popgate_spark.batch_reader",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
