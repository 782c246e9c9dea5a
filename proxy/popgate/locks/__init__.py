"""Locks on an AMQP broker, after the guidelines of amqp-locks: acquire, verify, renew, release, administer.

Theory of operation. A slot is two queues. The **token queue** (quorum, single active consumer) holds one message for
ever. Whoever has it unacked holds the slot; the others stand in the broker's line, in the order in which they came, so
that nobody polls and nobody starves. How often the message was handed out before is the fencing token: the broker
counts it in its replicated log, so it only grows, whoever crashes and whichever minority is cut off. The **slot queue**
exists as long as an administrator wants the slot to be there. A client that was handed the token asks for it, which
tells in one round trip whether the slot is still there; where it isn't, the client gives back. Who holds a slot says so
in a third queue, for administrators to see.

So removing a slot never hands it to anybody else: its holder keeps the token until it verifies and lets go, and when
the slot is put back meanwhile there still is one token. What a client can't learn in time, because it stands still
while the broker hands the token on, only the protected resource can refuse: by the token.
"""
