"""Publishes messages: chooses the queue of each message, and publishes each ``dedup_id`` at most once."""
