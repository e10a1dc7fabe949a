#!/bin/bash
# Train on several hosts with the mpirun (Hydra) of MPICH, or of an MPI that is made of it, such as Intel's. Its
# arguments are those of "xffl exec".
#   HOSTS=node1:4,node2:4 ./mpich.sh --federated 4,4 config.yaml --launch.processes 8
#   salloc -N 2 --ntasks-per-node 4 ./mpich.sh --federated 4,4 config.yaml --launch.processes 8
# Inside an allocation Hydra asks SLURM for the hosts and starts its daemons by srun. Outside it starts them by ssh,
# which must work without a password. The working folder and the virtual environment have to be on all hosts.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---- Change these, or set them outside.
SITE=${SITE:-$here/../env/cpu.sh}    # your copy of cpu.sh, cuda.sh or rocm.sh
HOSTS=${HOSTS-}                      # host:ranks,...; leave it empty inside an allocation
RUN=${RUN-}                          # stands before each rank's command, such as workflows/containers/run.sh

SITE=$(realpath "$SITE")
# shellcheck source=workflows/env/cpu.sh
. "$SITE"
# One rank for each slot: what HOSTS says, or the tasks of the allocation. The ranks get all of this script's variables.
options=(${HOSTS:+-hosts "$HOSTS"} ${XFFL_IFNAME:+-iface "$XFFL_IFNAME"})
# Each rank reads the environment on its own host.
# shellcheck disable=SC2016,SC2086 # for the rank's shell to expand; RUN is a list of words
exec mpirun "${options[@]}" bash -c '. "$0" && exec "$@"' "$SITE" $RUN python -m xffl exec "$@"
