"""pyarrow and fsspec, which have no stubs: the only module that declares it."""

import os
from typing import Any, TypeAlias

# Arrow's allocator reads this when it is loaded. By default it gives memory back after 10 ms, and the journal asks for
# the same amount again ten times a second: a fifth of its processor time was spent on fresh pages.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")

import fsspec.core as untyped_fsspec_core  # type: ignore[import-untyped]  # it has no stubs
import pyarrow as pa  # type: ignore[import-untyped]  # it has no stubs
import pyarrow.compute as untyped_compute  # type: ignore[import-untyped]  # it has no stubs
import pyarrow.fs as untyped_fs  # type: ignore[import-untyped]  # it has no stubs
import pyarrow.parquet as untyped_parquet  # type: ignore[import-untyped]  # it has no stubs

pyarrow: Any = pa
compute: Any = untyped_compute
filesystems: Any = untyped_fs
parquet: Any = untyped_parquet
fsspec_core: Any = untyped_fsspec_core

Array: TypeAlias = Any
RecordBatch: TypeAlias = Any
FileSystem: TypeAlias = Any
