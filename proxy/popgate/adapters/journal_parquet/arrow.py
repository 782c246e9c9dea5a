"""Imports pyarrow and fsspec, so that only this module must handle that they have no type stubs."""

import os
from typing import Any, TypeAlias

# Arrow's allocator reads this variable when it is loaded. By default, it returns freed memory to the system after 10
# ms. The journal needs the same amount of memory ten times per second. With the default, it spent a fifth of its
# processor time on new memory pages.
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
