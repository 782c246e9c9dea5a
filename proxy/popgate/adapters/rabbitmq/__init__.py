"""Implements the broker port and the ports for locks on RabbitMQ, over AMQP 0-9-1.

`broker.RabbitBroker` implements the broker port: topology, consumption and publishing. `lock_driver` and
`lock_connection` implement the ports for locks. The other modules support them.
"""
