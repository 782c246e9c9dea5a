"""Replicas of RabbitMQ's queues, seen and changed through any interface that the broker offers.

Three modules ask: ``management`` over HTTP, ``tools`` by ``rabbitmqctl`` and its kin, and ``backend``, which chooses.
``reading`` translates their answers into the domain's terms.
"""
