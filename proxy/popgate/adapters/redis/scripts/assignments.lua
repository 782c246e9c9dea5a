-- The assignments of pull clients. Request: the subscription, then the script's own arguments.
local versions, assignments = prefix .. 'assignment_versions', prefix .. 'assignments'
local function stands() return tonumber(redis.call('HGET', versions, request[1]) or 0) end
