"""Gathers the facts for the rules of ``popgate doctor``, and carries out fixes.

The facts come from AMQP, RabbitMQ's management API and command line tools, Redis, and the data folder.

``observing`` gathers the facts. It changes no settings, but creates and deletes a queue and an exchange to test
permissions. ``fixing`` carries out fixes.
"""
