"""What goes wrong: which rank failed first, who waits for whom, what ends a script, and faults made on purpose."""
