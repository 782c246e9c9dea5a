"""Implements the engine, which publishes, leases, settles and dead-letters messages.

The engine decides with the rules of ``domain``, and does all I/O through the ports. ``engine`` is the entry point.
``catalog`` maintains the topics and groups. ``subscription`` accepts the pops of one group, and its module ``serving``
chooses messages for them from the queue hosts (``queue``). ``lease`` grants leases; ``lease`` and ``settle`` end them.
``runtime.deadlines`` is the only timer.
"""
