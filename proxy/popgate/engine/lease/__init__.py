"""Leases: granting them, what ends them, and what a pop asks for."""
