"""Elastic federations: cells that are jobs of their own, which may be lost, come back, or come late."""
