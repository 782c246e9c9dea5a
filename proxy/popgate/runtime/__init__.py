"""Contains what every popgate process needs: clocks, timers, background tasks, logs and the data folder."""
