if not is_member() then
  return cmsgpack.pack('no member')
end
local mine = own(request[2])
return cmsgpack.pack({mine, current()})
