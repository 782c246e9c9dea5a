"""Implements the journal as Parquet files (decision 20; docs/journal.md has the schema).

    event loop: ``journal`` --calls--> thread: ``writer`` --``tables``--> Parquet --``places``--> disk or store

A proxy without a journal imports nothing from here: pyarrow is an extra, and slow to load.
"""
