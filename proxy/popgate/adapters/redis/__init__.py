"""Redis: the state that many proxies share, and values that locks protect.

``RedisConnection`` is one namespace in one Redis (or behind its Sentinels); ``RedisLeaseStore``, ``RedisLeaseGroups``,
``RedisDedupStore``, ``RedisCatalog`` and ``RedisLockStore`` fulfil the ports on it. Every call is one script: it is
done whole or not at all, whoever else calls at the time. ``RedisFence`` needs none of them.
"""
