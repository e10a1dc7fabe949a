#!/bin/bash
# One command in the container, with what a rank needs from outside. Put it before each rank's command:
#   ./run.sh xffl exec config.yaml                                        on this machine
#   srun --kill-on-bad-exit -N 2 --ntasks-per-node 4 ./run.sh xffl exec config.yaml   a rank in each task of SLURM
#   RUN=workflows/containers/run.sh HOSTS=a:4,b:4 workflows/mpi/openmpi.sh config.yaml
#   mpirun --host a:4,b:4 ./run.sh xffl exec config.yaml                  the same by hand
# The launcher stays outside. Its variables, network, shared memory and process ids are the container's, too.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---- Change these, or set them outside.
IMAGE=${IMAGE:-$here/xffl.sif}      # what "apptainer build" has written, in a folder that all hosts see
BIND=${BIND-}                       # folders of data and results: /scratch/me,/data:/data:ro; the working folder is there
APPTAINER=${APPTAINER:-$(command -v apptainer || command -v singularity || echo apptainer)}

options=(--bind "$PWD" --pwd "$PWD" ${BIND:+--bind "$BIND"})
# The drivers' libraries have to be those of this host's kernel.
if [ -e /dev/nvidiactl ]; then options+=(--nv); fi
if [ -e /dev/kfd ]; then options+=(--rocm); fi
# Packages of this host do not fit the container's Python, and the home folder, which is mounted, has some, too.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE=1
exec "$APPTAINER" exec "${options[@]}" "$IMAGE" "$@"
