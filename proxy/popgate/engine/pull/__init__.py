"""Pull mode: assigns queues to clients, and serves their pulls and commits."""
