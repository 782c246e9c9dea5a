"""Observes what ``popgate doctor`` has rules for, over AMQP, HTTP, RabbitMQ's tools, Redis and the data folder.

``observing`` gathers the facts, which changes nothing; ``fixing`` carries out fixes.
"""
