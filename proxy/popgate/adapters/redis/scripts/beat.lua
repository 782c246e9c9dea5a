if not is_member() then
  return cmsgpack.pack('no member')
end
beat(request[2])
if current() == request[3] then
  return cmsgpack.pack('the same')
end
return view()
