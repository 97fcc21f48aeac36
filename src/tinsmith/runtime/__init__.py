"""Parts of every Tinsmith process: supervised tasks, thread pools, clocks, failpoints, malloc and gc settings."""
