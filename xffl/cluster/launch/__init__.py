"""Launchers: the ranks of a job are started here, over ssh, srun or as local processes, and watched until they end."""
