"""Grants and ends leases, and defines the request and the result of a pop."""
