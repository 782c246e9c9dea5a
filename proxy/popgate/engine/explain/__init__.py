"""Explains, from the state in memory, why a pop gets nothing, and where a message is."""
