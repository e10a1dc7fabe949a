"""Mixins of a trainer: models, optimizers, data, rounds, metrics, loggers; each brings a section of configuration."""
