"""Where am I, and who started me: launchers, hosts, and the start of local processes. No torch at import."""
