"""One subscription: its parked pops and ready messages, and the choice of messages for each pop."""
