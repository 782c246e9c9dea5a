"""Writes the journal to Parquet files (decision 20). docs/journal.md describes the columns.

    event loop: ``journal`` --calls--> thread: ``writer`` --``tables``--> Parquet --``places``--> disk or store

A proxy without a journal does not import this package, because pyarrow is an optional dependency and slow to load.
"""
