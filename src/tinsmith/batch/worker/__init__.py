"""The worker's side of bulk jobs: the process that runs mappers and what it tells the coordinator."""
