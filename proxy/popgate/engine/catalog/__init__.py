"""Topics and groups: the catalog as this proxy knows it, and the subscriptions that it serves."""
