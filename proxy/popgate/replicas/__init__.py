"""Implements the replica keeper, which keeps enough replicas of each quorum queue and stream online.

Theory of operation. A loop observes the broker, computes a plan of changes (``domain.replica_plan``), and carries the
plan out. The loop runs only while the keeper holds a fenced lock, so that only one keeper is active in a virtual host:

    wait for the lock --got it--> active: look at the queues that are due --> plan --> change, and wait for catch-up
          ^                            |     ^                                              |
          +------- the lock is lost ---+     +----------------------------------------------+

Each queue is checked about once per interval. The checks of different queues are spread over the interval, so that the
loss of a node does not cause a burst of changes. A keeper measures how long a queue has had too few replicas, starting
at its own first observation. A keeper that takes over the lock starts to measure from 0. Before each change, the keeper
queries the members of the queue. If these members differ from the members for which the change was decided, the keeper
drops the change. In this case, an administrator has changed the members, or another keeper that has lost the lock but
has not noticed the loss yet. RabbitMQ does not check fencing tokens. Instead, the keeper queries the members and renews
the lock right before each request. A renewal needs a majority of the broker's nodes. If two keepers make the same
change, the second request does no harm.
"""
