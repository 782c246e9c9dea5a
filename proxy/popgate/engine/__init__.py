"""The engine: pop, settle, publish, dead-letter. Decides with the domain, acts through the ports.

One way through the room: ``engine`` is the door; ``topics`` holds what exists; a ``subscription`` takes the pops of one
group, and its ``serving`` answers them from what its ``queue_host``s have; ``settling`` and ``moves`` end leases;
``deadlines`` is the only timer.
"""
