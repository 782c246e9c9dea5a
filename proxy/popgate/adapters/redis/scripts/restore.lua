-- Write back records that their owner remembers and the store does not have. Request: the queue, the copies, a record
-- for each (state, lease id, leased_at, microseconds until it is visible, count, first_at, epoch, target, target copy,
-- reason), and the owner's last epoch, false except for the last part. With it the owner claims the queue again; until
-- then the queue is unclaimed.
local queue, copies, records, above = unpack(request)
local found = {}
read_records(queue, copies, nil, found)
begin_changes({ queue })
for i = 1, #copies do
  if not found[i] then
    local r = records[i]
    changed(1, copies[i], pack_record({
      state = r[1], lease_id = r[2], leased_at = r[3], visible_at = now + r[4], count = r[5], first_at = r[6],
      changed_at = now, epoch = r[7], target = r[8], target_copy = r[9], reason = r[10],
    }))
  end
end
write_changes({ queue })
return cmsgpack.pack(above and new_epoch(queue, above))
