"""Where the lighthouse of an elastic run is, and what it tells of its cells."""
