"""Connects the engine to the cluster: pops at other proxies, requests from other proxies, and the queues to serve."""
