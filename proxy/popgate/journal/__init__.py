"""Processes delivery events on the engine's side of the journal port."""
