"""Serves the HTTP interface: the native interface, the admin interface, metrics and documentation (decision 1).

The package owns no state: it turns requests into engine calls, and the engine's results into answers. ``app`` is the
entry point.
"""
