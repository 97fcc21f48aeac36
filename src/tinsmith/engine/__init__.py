"""The engine process: it claims requests, runs them in batches on a backend and a sampler, and settles the results."""
