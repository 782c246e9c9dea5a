"""Publishing: routes each message to its queues, and publishes each dedup_id at most once."""
