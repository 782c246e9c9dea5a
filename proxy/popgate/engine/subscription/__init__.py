"""One subscription: its parked pops, its ready messages, and which pop gets which message."""
