"""SLURM: jobs are submitted, their nodes and tasks read, and their states followed."""
