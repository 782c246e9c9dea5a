"""Settles leases (ack, release, extend, reject), and purges subscriptions."""
