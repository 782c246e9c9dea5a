"""The replica keeper: keeps at least the wanted number of replicas of every quorum queue and stream online.

Theory of operation. One loop observes the broker, makes the domain's pure plan from that, and carries the plan out. It
does so only while it holds a fenced lock, so that only one of all keepers of a virtual host is active:

    wait for the lock --got it--> active: look at the queues that are due --> plan --> change, and wait for catch-up
          ^                            |     ^                                              |
          +------- the lock is lost ---+     +----------------------------------------------+

Every queue is looked at once in an interval, at its own moment, so a lost node does not cause a burst of changes. The
time for which a queue has had too few replicas is counted from the keeper's first look; a keeper that takes the lock
over starts to count again. Before each change the keeper asks the queue's members. It drops the change if they are not
the members for which it was decided, because a human, or a keeper that does not know yet that it has lost the lock, was
faster. RabbitMQ does not check fencing tokens. Instead, the keeper looks at the members, and renews the lock right
before each request (which needs a majority of the broker's nodes), and its changes do no harm if they are made twice.
"""
