"""Serves one subscription: manages its parked pops and ready messages, and chooses the messages for each pop."""
