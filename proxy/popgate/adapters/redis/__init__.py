"""Redis: what popgate keeps there."""
