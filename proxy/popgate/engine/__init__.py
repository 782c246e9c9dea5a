"""The engine: pop, settle, publish, dead-letter. Decides with the domain, acts through the ports.

One way through the room: ``engine`` is the door; ``topics`` holds what exists; a ``subscription`` serves the pops of
one group from its ``queue_host``s; ``settling`` and ``moves`` end leases; ``deadlines`` is the only timer.
"""
