"""Observes and changes the replicas of RabbitMQ's queues, with the interfaces that the broker offers.

``management`` uses the management API over HTTP. ``tools`` runs ``rabbitmqctl`` and the other command line tools.
``backend`` chooses the interface for each task. ``reading`` converts the answers of both interfaces to types of the
domain.
"""
