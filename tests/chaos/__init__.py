"""Chaos with an audit: a whole cluster whose parts are killed, paused and cut off at random, and what it promised."""
