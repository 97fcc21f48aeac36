"""The worker's side of bulk jobs: the process that runs mappers and reports to the coordinator."""
