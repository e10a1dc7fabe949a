"""What a round makes of the cells' weights: combiners, server optimizers, clients, schedules, and their names."""
