"""What every process of Tinsmith has: supervised tasks, thread lanes, clocks, failpoints and memory given back."""
