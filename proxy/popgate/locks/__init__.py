"""Locks on an AMQP broker, after the guidelines of amqp-locks: acquire, verify, renew, release, administer.

Theory of operation. A slot is two queues. The **token queue** (quorum, single active consumer) holds one message for
ever. The client that has it unacked holds the slot. The others wait as consumers of the queue, in the order in which
they came, so that no client polls and none starves. The number of earlier deliveries of the message is the fencing
token: the broker counts it in its replicated log, so it only grows, even if clients crash or a minority of nodes is cut
off. The **slot queue** exists as long as an administrator wants the slot. A client that gets the token asks for the
slot queue, in one round trip; if the slot has been removed, the client returns the token. The holder of a slot writes
its name into a third queue, for administrators.

So the removal of a slot never hands it to another client: its holder keeps the token until it verifies and lets go, and
if the slot is added again meanwhile, there is still one token. A client that is suspended while the broker hands the
token on can't know that in time. Only the protected resource can refuse such a client, by its token.
"""
