"""The page about a run: its records are read, summed up, drawn and written as one HTML file."""
