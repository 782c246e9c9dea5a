"""What every process needs to live: clocks, background work, logs, and a folder for what outlives it."""
