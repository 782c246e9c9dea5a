"""popgate on Spark: a streaming source, a sink, and the jobs that read the delivery journal.

The names below are imported when they are asked for: the journal's schema is read where there is no Spark, too.
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
