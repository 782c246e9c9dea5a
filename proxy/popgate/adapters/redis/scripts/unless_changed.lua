-- Request: ..., [4] the expected value of the field, false: none. Returns false, and ends the script, if it has another
-- one.
if redis.call('HGET', prefix .. request[1], request[2]) ~= request[4] then return cmsgpack.pack(false) end
