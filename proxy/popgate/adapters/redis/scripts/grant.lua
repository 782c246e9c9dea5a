-- One pop batch without a lease group; request[11] is the attempt id.
grant_all()
if #granted > 0 then
  write_changes(queues)
  if request[11] then note_attempt(request[11]) end
end
return reply_granted()
