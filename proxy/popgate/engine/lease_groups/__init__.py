"""Lease groups: many leases that are read in slices and settled together."""
