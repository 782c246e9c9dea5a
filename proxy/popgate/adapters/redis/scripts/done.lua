-- The end of scripts that return nothing.
return cmsgpack.pack(true)
