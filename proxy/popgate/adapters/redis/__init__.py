"""Implements on Redis the ports for state that several proxies share, and fenced writes of values that locks protect.

``RedisConnection`` runs scripts on one namespace of keys in one Redis, which Sentinels may locate. ``RedisLeaseStore``,
``RedisLeaseGroups``, ``RedisDedupStore``, ``RedisCatalog``, ``RedisLockStore`` and further classes implement the ports
with it. Redis runs each script completely or not at all, and runs nothing else at the same time. Most calls of a port
run one script. ``RedisFence`` uses none of these classes.
"""
