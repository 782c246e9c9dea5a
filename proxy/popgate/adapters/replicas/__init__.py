"""Replicas of RabbitMQ's queues, seen and changed in whichever ways the broker offers.

Three modules ask: ``management`` over HTTP, ``tools`` by ``rabbitmqctl`` and its kin, and ``backend``, which chooses.
``reading`` turns what they answer into the domain's words.
"""
