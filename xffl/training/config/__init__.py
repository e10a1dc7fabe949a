"""Configuration of a run: files, environment and command line, checked against dataclasses."""
