"""What happens to delivery events on this side of the journal port."""
