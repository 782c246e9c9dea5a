-- The names of all queues that may have records, and the time.
return cmsgpack.pack({ redis.call('HKEYS', prefix .. 'claims'), now })
