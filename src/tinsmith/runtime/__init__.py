"""What every Tinsmith process needs: supervised tasks, thread lanes, clocks, failpoints, malloc and gc settings."""
