#!/bin/bash
# Train on several hosts with Open MPI's mpirun. Its arguments are those of "xffl exec".
#   HOSTS=node1:4,node2:4 ./openmpi.sh --federated 4,4 config.yaml --launch.processes 8
#   salloc -N 2 --ntasks-per-node 4 ./openmpi.sh --federated 4,4 config.yaml --launch.processes 8
# Inside an allocation Open MPI asks SLURM for the hosts and starts its daemons by srun. Outside it starts them by ssh,
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
# One rank for each slot: what HOSTS says, or the tasks of the allocation.
options=(${HOSTS:+--host "$HOSTS"})
# Open MPI hands on only the variables that it is told of.
for name in $(compgen -e); do
    case $name in
        PATH | LD_LIBRARY_PATH | PYTHONPATH | OMP_NUM_THREADS | SITE_* | XFFL_* | MPI4PY_* | NCCL_* | GLOO_* | TORCH_* | \
            IMAGE | BIND | APPTAINER* | SINGULARITY*) options+=(-x "$name") ;;
    esac
done
# A rank may use all of its share of the node: by default Open MPI binds it to one core where there are few ranks.
options+=(--bind-to none)
if [ -n "$XFFL_IFNAME" ]; then
    # It would try all interfaces, and wait for those that lead nowhere, such as a container's bridge.
    export OMPI_MCA_oob_tcp_if_include=$XFFL_IFNAME OMPI_MCA_btl_tcp_if_include=$XFFL_IFNAME   # Open MPI 4
    export PRTE_MCA_prte_if_include=$XFFL_IFNAME                                               # Open MPI 5
fi
# Each rank reads the environment on its own host.
# shellcheck disable=SC2016,SC2086 # for the rank's shell to expand; RUN is a list of words
exec mpirun "${options[@]}" bash -c '. "$0" && exec "$@"' "$SITE" $RUN python -m xffl exec "$@"
