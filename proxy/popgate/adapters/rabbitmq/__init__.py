"""RabbitMQ as a broker: topology, consumption and publishing over AMQP 0-9-1.

`broker.RabbitBroker` is the interface; everything else in this package serves it.
"""
