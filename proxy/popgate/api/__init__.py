"""The HTTP face: the native interface, the admin interface, metrics and documentation (design: section 3).

A face owns no state: it turns requests into engine calls, and what the engine says into answers. ``app`` is the door.
"""
