# What this machine needs before xffl, to make the rounds.
export PATH=/path/to/.venv/bin:$PATH
