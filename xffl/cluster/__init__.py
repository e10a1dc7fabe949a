"""The machines of a job: the environment of a rank, hosts, cells, launchers, SLURM, checks. No torch at import."""
