"""The balance in TLA+, and TLC to check it. `make tla`."""
