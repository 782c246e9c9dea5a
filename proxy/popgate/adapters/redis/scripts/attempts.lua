-- Call visit(queue, copy, record, raw) for each of an attempt's leases that was neither settled nor granted to others
-- since.
local function each_good_lease(noted, visit)
  for n = 2, #noted do
    local run, copies, found = noted[n], {}, {}
    for i = 2, #run do copies[i - 1] = run[i] end
    read_fields(live_key(run[1]), copies, nil, found)
    for i = 1, #copies do
      local raw = found[i]
      if raw and (state_of(raw) == LEASED or state_of(raw) == EXPIRED) then
        local record = unpack_record(raw)
        if record.lease_id == noted[1] then visit(run[1], copies[i], record, raw) end
      end
    end
  end
end
