"""What is known of the past: metrics of runs, steps, samples, what was used, what was done. SQL only."""
