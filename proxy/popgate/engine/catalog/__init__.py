"""Maintains this proxy's copy of the catalog of topics and groups, and the subscriptions that it serves."""
