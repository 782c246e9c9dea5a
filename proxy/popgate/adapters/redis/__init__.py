"""Redis: the state that many proxies share, and values that locks protect.

``RedisConnection`` is one namespace in one Redis (or behind its Sentinels); ``RedisLeaseStore``, ``RedisLeaseGroups``,
``RedisDedupStore``, ``RedisCatalog`` and ``RedisLockStore`` implement the ports on it. Every call is one script: it is
done completely or not at all, whatever other processes do at the same time. ``RedisFence`` needs none of them.
"""
