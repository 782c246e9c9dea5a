-- Request: the subscription, the limit, whether a client waits for it.
local name, limit = request[1], request[2]
if not is_counted(name, limit, {}) then return cmsgpack.pack({ 'uncounted' }) end
local mine, all, refused = vacancy(name, limit)
tidy(name, refused)
if request[3] and (mine == 0 or redis.call('HEXISTS', refused_key(name), limit[2]) == 1) then
  note_refusal(name, limit[2], true)
end
return cmsgpack.pack({ mine, all <= 0 })
