"""The `tinsmith` command. `main` defines the subcommands; each larger one has its own module."""
