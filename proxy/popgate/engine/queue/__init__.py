"""One queue: what this proxy has buffered of it, and the channel on which it arrives.

``state`` decides, without I/O; ``host`` carries the decisions out.
"""
