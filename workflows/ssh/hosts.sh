#!/bin/bash
# Train on several hosts that only ssh joins: no scheduler, no MPI. Its arguments are those of "xffl exec".
#   HOSTS=node1:4,node2:4 ./hosts.sh --federated 4,4 config.yaml --launch.processes 8
#   HOSTS=@hosts.txt ./hosts.sh ...          # lines such as "node1 slots=4 address=10.0.0.1"
# ssh must work without a password, and know each host's key: xffl asks for neither. The working folder and the virtual
# environment have to be on all hosts. Ctrl-C here ends the ranks there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---- Change these, or set them outside.
SITE=${SITE:-$here/../env/cpu.sh}    # your copy of cpu.sh, cuda.sh or rocm.sh
HOSTS=${HOSTS:?host:ranks,... or @FILE}
# A key or a port of your own: XFFL_SSH="ssh -i /home/me/.ssh/cluster -p 2222"

# shellcheck source=workflows/env/cpu.sh
. "$SITE"
exec python -m xffl exec --hosts "$HOSTS" "$@"
