"""The cluster: pops that other proxies serve, requests from other proxies, and the queues that this proxy owns."""
