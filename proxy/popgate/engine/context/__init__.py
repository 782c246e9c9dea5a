"""What every part of the engine shares: the ports, the settings, the memory budget, and the way to other proxies."""
