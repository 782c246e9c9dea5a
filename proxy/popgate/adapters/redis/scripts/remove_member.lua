if is_member() then
  remove({me})
end
return cmsgpack.pack(current())
