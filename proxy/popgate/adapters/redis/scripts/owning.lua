-- Returns which of the queues this member owns from now on; it takes those without an owner.
local function own(queues)
  local mine, taken = {}, 0
  for _, queue in ipairs(queues) do
    taken = taken + redis.call('HSETNX', owners, queue, me)
    if redis.call('HGET', owners, queue) == me then
      mine[#mine + 1] = queue
    end
  end
  if taken > 0 then
    changed()
  end
  return mine
end
