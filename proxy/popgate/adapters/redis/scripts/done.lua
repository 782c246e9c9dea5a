-- For scripts that have nothing to say.
return cmsgpack.pack(true)
