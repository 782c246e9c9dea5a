"""Shared by every part of the engine: the ports, the settings, the memory budget, and the router to other proxies."""
