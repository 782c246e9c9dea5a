-- Request: the key.
local group, refused = find_group(request[1])
return refused or cmsgpack.pack(group and stored(group) or { now })
