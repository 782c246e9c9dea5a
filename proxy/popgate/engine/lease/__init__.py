"""Leases: granting and ending them, and the pop requests for them."""
