"""Locks on an AMQP broker, after the guidelines of amqp-locks: acquire, verify, renew, release, administer.

Theory of operation. A slot consists of queues. The **token queue** (quorum, single active consumer) permanently
contains one message, the token. The client that has this message unacknowledged holds the slot. The waiting clients are
further consumers of the queue, and receive the token in the order in which they arrived. So no client polls and none
starves. The fencing token is computed from the number of earlier deliveries of the message. The broker counts the
deliveries in its replicated log, so the number only grows, even if clients crash or a minority of nodes is cut off. The
**slot queue** exists as long as an administrator wants the slot. A client that receives the token checks, in one round
trip, whether the slot queue exists. If the slot has been removed, the client returns the token. The holder of a slot
writes its name into another queue, for administrators.

So the removal of a slot never gives it to another client: the holder keeps the token until it verifies the lock and
then releases it. If the slot is added again before that, there is still only one token. A client that is suspended
while the broker gives the token to another client can't notice this in time. Only the protected resource can refuse
such a client, by its fencing token.
"""
