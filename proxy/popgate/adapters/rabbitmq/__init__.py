"""Implements the broker port on RabbitMQ: topology, consumption and publishing over AMQP 0-9-1.

`broker.RabbitBroker` is the interface. Everything else in this package supports it.
"""
