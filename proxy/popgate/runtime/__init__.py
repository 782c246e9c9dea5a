"""Contains the basics of every process: clocks, background work, logs, and the data folder."""
