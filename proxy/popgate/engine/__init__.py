"""The engine: pop, settle, publish, dead-letter. Decides with the domain, acts through the ports.

``engine`` is the entry point. ``catalog`` holds the topics and groups. A ``subscription`` takes the pops of one group,
and its ``serving`` answers them with the messages of its queue hosts (``queue``). ``settle`` and ``lease`` end leases.
``runtime.deadlines`` is the only timer.
"""
