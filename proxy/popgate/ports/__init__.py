"""Defines the interfaces, as Protocols, through which the engine uses brokers, stores, clocks and other proxies.

Adapters implement these interfaces without inheritance. Contract tests verify each adapter.
"""
