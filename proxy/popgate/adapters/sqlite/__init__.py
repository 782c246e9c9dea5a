"""Implements the embedded store: messages, leases and the catalog in one SQLite file, owned by one thread.

``Database`` owns the file and the thread. ``SqliteBroker`` and the stores, such as ``SqliteLeaseStore`` and
``SqliteCatalog``, implement the ports on it. If RabbitMQ is the broker, the stores are used without ``SqliteBroker``.
"""
