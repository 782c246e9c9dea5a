"""One queue: its buffered messages, and the channel that delivers them.

``state`` decides, without I/O; ``host`` carries the decisions out.
"""
