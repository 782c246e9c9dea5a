"""Serves pull mode: assigns queues to clients, and answers their pulls and commits."""
