"""RabbitMQ as a broker: topology, consumption and publishing over AMQP 0-9-1.

`broker.RabbitBroker` is the face; everything else in this room serves it.
"""
