"""The `tinsmith` command: `main` has the subcommands; the larger ones have a module each."""
