"""The rules of popgate as values and pure functions: no I/O, no clock, no randomness."""
