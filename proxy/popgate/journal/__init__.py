"""Contains implementations of the journal port that store no events: counters, and a combination of journals."""
