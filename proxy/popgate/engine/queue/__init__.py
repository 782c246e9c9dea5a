"""Serves one queue: buffers its messages, and consumes them over a channel.

``state`` makes the decisions, without I/O; ``host`` carries them out.
"""
