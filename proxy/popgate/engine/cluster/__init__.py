"""Other proxies: pops that they serve, what they ask, and the queues that this proxy owns."""
