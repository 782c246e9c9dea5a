"""Holds what all parts of the engine share: ports, settings, the memory budget, and the router to other proxies."""
