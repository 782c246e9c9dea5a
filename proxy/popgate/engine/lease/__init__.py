"""Grants and ends leases, and defines the requests for them."""
