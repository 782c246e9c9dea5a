"""Implements the embedded store: messages, leases and the catalog in one SQLite file, owned by one thread.

``Database`` owns the file and the thread. ``SqliteBroker`` implements the broker port on a ``Database``. The stores,
such as ``SqliteLeaseStore`` and ``SqliteCatalog``, implement the state ports. If RabbitMQ is the broker, popgate uses
only the stores.
"""
