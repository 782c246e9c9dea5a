-- The subscriptions that have streams of lease groups.
return cmsgpack.pack(redis.call('SMEMBERS', prefix .. 'group_homes'))
