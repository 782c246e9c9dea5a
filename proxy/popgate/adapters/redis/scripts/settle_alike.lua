-- The most common batch: copies, each once, that one ask settles. It is decided as in settle.lua, at half the cost; any
-- other batch falls through to it. Request: see settle.lua; [6]: whether each copy occurs once.
local function settle_alike()
  local queues, queue_of, copies = request[1], request[2], request[3]
  if not request[6] or request[5] or has_limits or #copies == 0 then return end
  local ask, rule = request[4][1], rule_of(request[4][1][2])
  if rule.to < ACKED then return end
  local fields, written, records, place_of, places, at = {}, {}, {}, {}, {}, {}
  for q = 1, #queues do fields[q], written[q] = queue_of and {} or copies, {} end
  if queue_of then
    for i = 1, #copies do
      local of_queue = fields[queue_of[i]]
      of_queue[#of_queue + 1] = copies[i]
      at[i] = #of_queue
    end
  end
  for q = 1, #queues do
    local of_queue, to_write, found = fields[q], written[q], {}
    read_fields(live_key(queues[q]), of_queue, nil, found)
    local n, former, new = 0, nil, nil
    for i = 1, #of_queue do
      local raw = found[i]
      if raw ~= former then -- copies that were leased together have equal records
        if not raw then return end
        local status
        status, new = decide_settle(raw, ask, rule)
        if status ~= DONE then return end
        former = raw
        if not place_of[new] then
          records[#records + 1] = new
          place_of[new] = #records
        end
      end
      to_write[n + 1], to_write[n + 2] = of_queue[i], new
      n = n + 2
    end
  end
  for i = 1, #copies do
    if #records == 1 then break end
    places[i] = place_of[queue_of and written[queue_of[i]][2 * at[i]] or written[1][2 * i]]
  end

  for q = 1, #queues do settle_records(queues[q], fields[q], written[q]) end
  return reply(records, now, DONE, #records == 1 and 1 or places)
end

local answered = settle_alike()
if answered then return answered end
