# What the machine of the lighthouse needs before xffl: its steps read this first. CHANGE what does not fit.
# module load ...
. "$HOME/xffl/.venv/bin/activate"
export XFFL_TOKEN_FILE=$HOME/xffl/token # the same token everywhere, mode 0600
