"""The replica keeper: keeps at least the wanted number of replicas of every quorum queue and stream online.

Theory of operation. One loop observes the broker, makes the domain's pure plan of it, and carries the plan out; it does
so while it holds a fenced lock, so that of all keepers of a virtual host one is at work:

    standing in line --the lock--> at work: look at what is due --> plan --> change, and wait until it has caught up
          ^                            |     ^                                  |
          +------- the lock is lost ---+     +----------------------------------+

Every queue is looked at once in an interval, at a moment of its own: a lost node makes no storm. How long a queue has
been short is counted from when this keeper saw it first; who takes the lock over begins to count anew. Before each
change the keeper asks the queue's members themselves, and drops the change if they are not those for which it was
decided: a human, or a keeper that does not know yet that it is none, was there first. RabbitMQ knows no fencing tokens,
so this look, the lock's renewal right before each asking (for which a majority of the broker's nodes is needed), and
changes that harm nobody if made twice stand in for it.
"""
