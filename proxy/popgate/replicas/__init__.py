"""The replica keeper: keeps at least the wanted number of replicas of every quorum queue and stream online.

Theory of operation. One loop observes the broker, computes a plan with the domain's pure function, and carries the plan
out. The loop runs only while its keeper holds a fenced lock, so that only one keeper of a virtual host is active at a
time:

    wait for the lock --got it--> active: look at the queues that are due --> plan --> change, and wait for catch-up
          ^                            |     ^                                              |
          +------- the lock is lost ---+     +----------------------------------------------+

Every queue is checked once per interval, each at a different time, so that the loss of a node does not cause a burst of
changes. The time for which a queue has had too few replicas is measured from the keeper's first observation. A keeper
that takes over the lock starts to measure from 0. Before each change, the keeper queries the members of the queue. If
they differ from the members for which the change was decided, the keeper drops the change: an administrator has changed
them, or another keeper that has not noticed yet that it has lost the lock. RabbitMQ does not check fencing tokens.
Instead, the keeper queries the members and renews the lock right before each request (a renewal needs a majority of the
broker's nodes). A change that is made twice does no harm.
"""
