"""Pull mode: which client has which queue, and what it gets."""
