"""The interfaces through which the engine uses the outside world, as Protocols.

Adapters implement them without inheritance; contract tests verify each adapter.
"""
