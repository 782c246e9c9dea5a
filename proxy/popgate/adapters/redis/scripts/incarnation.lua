-- The name of this data, made at first use: whoever finds another one than he knew knows that the data were lost.
-- ARGV: the prefix of all keys, a new name.
redis.call('SETNX', ARGV[1] .. 'incarnation', ARGV[2])
return redis.call('GET', ARGV[1] .. 'incarnation')
