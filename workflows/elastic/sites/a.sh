# What facility a needs before xffl: its steps read this first. CHANGE what does not fit.
# module load ...
. "$HOME/xffl/.venv/bin/activate"
export XFFL_TOKEN_FILE=$HOME/xffl/token # the same token everywhere, mode 0600
# export XFFL_IFNAME=ib0 # the interface at which the other facility's senders reach this one's
# export XFFL_LIGHTHOUSE=http://127.0.0.1:29510 # where ssh -L brings the lighthouse here
