"""Consuming from bare RabbitMQ, without a proxy: programs share a group's queues among them, with nobody who leads.

    from popgate_client.amqp import AmqpConsumer

    AmqpConsumer("orders", "billing", lambda message: print(message.text)).run()

Needs aiormq: `pip install 'popgate[pull]'`. The names below are the public interface; the modules are not.
``balance`` decides who consumes what. It is the proxy's own module (a link to it in the sources).
"""

try:
    from popgate_client.amqp.consumer import AmqpConsumer, AmqpState
except ModuleNotFoundError as error:
    raise ImportError(f"popgate_client.amqp needs {error.name}: pip install 'popgate[pull]'") from error

__all__ = ["AmqpConsumer", "AmqpState"]
