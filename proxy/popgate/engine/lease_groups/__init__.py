"""Serves lease groups: sets of leases whose messages are read in slices, and that are settled together."""
