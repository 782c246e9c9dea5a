"""Shared by tests and benchmarks: private RabbitMQ, Redis and proxy processes that can be killed and paused at will.

Nothing here touches a server that it did not start. Every call is synchronous; coroutines use `asyncio.to_thread`.
"""
