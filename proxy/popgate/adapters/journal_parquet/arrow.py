"""pyarrow, which has no stubs: the one place that says so."""

from typing import Any, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]  # it has no stubs
import pyarrow.compute as untyped_compute  # type: ignore[import-untyped]  # it has no stubs
import pyarrow.fs as untyped_fs  # type: ignore[import-untyped]  # it has no stubs
import pyarrow.parquet as untyped_parquet  # type: ignore[import-untyped]  # it has no stubs

pyarrow: Any = pa
compute: Any = untyped_compute
filesystems: Any = untyped_fs
parquet: Any = untyped_parquet

Array: TypeAlias = Any
RecordBatch: TypeAlias = Any
FileSystem: TypeAlias = Any
