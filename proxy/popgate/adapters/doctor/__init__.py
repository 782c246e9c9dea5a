"""Observes what ``popgate doctor`` has rules for, over AMQP, HTTP, RabbitMQ's tools, Redis and the data folder.

``observing`` puts the facts together, ``mending`` carries out fixes. Nothing that is looked at is changed.
"""
