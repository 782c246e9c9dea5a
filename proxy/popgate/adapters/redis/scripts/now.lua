-- The store's time, in microseconds.
return cmsgpack.pack(now)
