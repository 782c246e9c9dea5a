"""Settlements: ack, release, extend, reject, and purge."""
