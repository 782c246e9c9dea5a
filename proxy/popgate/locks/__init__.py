"""Implements locks on an AMQP broker as amqp-locks describes them, and locks that a proxy holds for its clients.

Theory of operation. A lock has one or more slots, and each slot consists of queues on the broker. The **token queue**
(quorum, single active consumer) permanently contains one message, the token message. The client to which this message
is delivered and not acknowledged holds the slot. The waiting clients are further consumers of the token queue, and
receive the token message in the order in which they subscribed. So no client polls, and no client starves. The fencing
token is computed from the number of earlier deliveries of the token message. The broker counts these deliveries in its
replicated log, so the number only grows, even if clients crash or a minority of nodes is cut off. The **slot queue**
exists while the slot exists: an administrator removes a slot by deleting its slot queue. A client that receives the
token message checks, in one round trip, whether the slot queue exists. If the slot queue was deleted, the client
returns the token message. The holder of a slot writes its name into a third queue, which administrators read.

If an administrator removes a held slot, no other client can acquire this slot meanwhile. The holder keeps the token
message until it verifies the lock, notices the removal, and releases the lock. If the slot is added again before that,
the token queue still contains only one token message. A suspended client can't notice in time that the broker has
delivered the token message to another client. Only the protected resource can refuse the writes of such a client,
because their fencing token is too low.
"""
