"""The embedded store: messages, leases and the catalog in one SQLite file, owned by one thread.

``Database`` is the file and the thread; ``SqliteBroker``, ``SqliteLeaseStore`` and ``SqliteCatalog`` implement the
ports on it. With RabbitMQ as the broker, the other two work alone.
"""
