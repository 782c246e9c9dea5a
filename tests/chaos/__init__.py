"""Chaos with an audit: parts of a whole cluster are killed, paused and cut off at random, and its promises are
checked.
"""
