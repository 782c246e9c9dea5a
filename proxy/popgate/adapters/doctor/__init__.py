"""Gathers the facts for the rules of ``popgate doctor``, and carries out fixes.

The facts are gathered over AMQP, HTTP, RabbitMQ's tools, Redis and from the data folder.

``observing`` gathers the facts, which changes nothing. ``fixing`` carries out fixes.
"""
