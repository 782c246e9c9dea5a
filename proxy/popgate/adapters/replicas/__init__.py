"""Observes and changes the replicas of RabbitMQ's queues, through any interface that the broker offers.

``management`` uses HTTP, and ``tools`` runs ``rabbitmqctl`` and the other command line tools. ``backend`` chooses
between them. ``reading`` translates their answers into the domain's terms.
"""
