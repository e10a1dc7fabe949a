"""SLURM: jobs are submitted (``submit``), followed (``job_monitor``), and their hosts read (``allocation``)."""
