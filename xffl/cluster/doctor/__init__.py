"""What may be wrong with the machines of a job, found out before the job is: one file for each kind of check."""
