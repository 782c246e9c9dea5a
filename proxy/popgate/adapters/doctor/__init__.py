"""Observes what ``popgate doctor`` has rules for, over AMQP, HTTP, RabbitMQ's tools, Redis and the data folder.

``observing`` gathers the facts, which changes nothing; ``mending`` carries out fixes.
"""
