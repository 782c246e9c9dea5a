"""Consumes directly from RabbitMQ, without a proxy: programs share a group's queues among them, without a leader.

    from popgate_client.amqp import AmqpConsumer

    AmqpConsumer("orders", "billing", lambda message: print(message.text)).run()

It requires aiormq: `pip install 'popgate[pull]'`. The names below are the public interface; the modules are not.
``balance`` decides which program consumes which queue. It is a copy of the proxy's module.
"""

try:
    from popgate_client.amqp.consumer import AmqpConsumer, AmqpState
except ModuleNotFoundError as error:
    raise ImportError(f"popgate_client.amqp needs {error.name}: pip install 'popgate[pull]'") from error

__all__ = ["AmqpConsumer", "AmqpState"]
