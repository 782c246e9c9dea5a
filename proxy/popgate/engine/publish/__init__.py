"""Publishing: where a message goes, and each dedup_id at most once."""
