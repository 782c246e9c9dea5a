-- One pop batch without a lease group.
grant_all()
if #granted > 0 then
  write_changes(queues)
  if request[11] then note_attempt(request[11]) end
end
return reply_granted()
