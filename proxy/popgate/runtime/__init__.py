"""What every process needs to live: clocks, and services that start and stop."""
