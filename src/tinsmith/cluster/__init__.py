"""The fleet of engines and samplers: leases, ownership of runs, dispatch of samples, and supervision of processes."""
