# shellcheck shell=sh
# The environment of a site of AMD GPUs. PyTorch's wheels bring ROCm and RCCL along: only the driver is the site's.
# For ". rocm.sh" in a job script, for "slurm.setup" of xffl submit, and for workflows/mpi and workflows/ssh, which read
# it on every host. Any POSIX shell reads it, "set -eu" or not. What is set already stays, unless it says so below.

# ---- Change these for your site, or set them outside.

# The MPI that the site has built for its network, as "module avail" lists it; only mpirun needs it.
SITE_MODULES="${SITE_MODULES-}"    # openmpi/5.0-rocm6

# The virtual environment that has xffl, in a folder that all hosts see.
SITE_VENV="${SITE_VENV-}"    # /work/project/venv

# The fast network's interface, for rank 0's address and RCCL's start ("xffl doctor" lists interfaces). Without it the
# address of the host's name is taken, which is often that of a slow network for logging in.
export XFFL_IFNAME="${XFFL_IFNAME-}"    # ib0, or hsn0 on Slingshot

# ---- The rest is the same at most sites.

# Else torch takes all cores of the node in every rank, and the ranks wait for each other's threads.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# From version 22.05 on, srun no longer takes the job's --cpus-per-task by itself, and binds all of a rank to one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"; fi

# ROCR_VISIBLE_DEVICES, which SLURM sets, hides GPUs and numbers the rest from 0. The other variables count among those:
# where SLURM sets them as well, to the GPUs' numbers on the node, they would hide the rest, too.
if [ -n "${ROCR_VISIBLE_DEVICES:-}" ]; then unset HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL; fi

# MIOpen keeps the kernels that it has tuned in a database below the home folder. Its locks are slow, or fail, on the
# file systems that nodes share, and all ranks want them at once.
# Its name is drawn, once for a job, since another user of the node could put something of his own at a name that he
# knows. On the job's other nodes it is made anew.
if [ -z "${SITE_CACHE:-}" ]; then
    SITE_CACHE=$(mktemp -d "${TMPDIR:-/tmp}/miopen-XXXXXXXXXX") || return 1
    export SITE_CACHE
fi
mkdir -m 700 "$SITE_CACHE" 2>/dev/null || { [ -O "$SITE_CACHE" ] && [ ! -L "$SITE_CACHE" ]; } || {
    echo "SITE_CACHE=$SITE_CACHE is no folder of your own on $(uname -n)" >&2
    return 1
}
export MIOPEN_USER_DB_PATH="${MIOPEN_USER_DB_PATH:-$SITE_CACHE}"
export MIOPEN_CUSTOM_CACHE_DIR="${MIOPEN_CUSTOM_CACHE_DIR:-$SITE_CACHE}"

# RCCL finds InfiniBand and Infinity Fabric by itself. On a Slingshot network load the module of the plugin, such as
# aws-ofi-rccl: without it RCCL takes TCP.

# Neither modules nor virtual environments always survive "set -u".
case $- in *u*) site_unset=-u ;; *) site_unset=+u ;; esac
set +u
if [ -n "$SITE_MODULES" ]; then
    # A batch script may start without the function.
    command -v module >/dev/null || for site_file in /etc/profile.d/modules.sh /etc/profile.d/lmod.sh; do
        if [ -r "$site_file" ]; then . "$site_file"; fi
    done
    # shellcheck disable=SC2086 # a list of words
    module load $SITE_MODULES || { echo "SITE_MODULES=$SITE_MODULES cannot be loaded; see \"module avail\"" >&2; return 1; }
fi
if [ -n "$SITE_VENV" ]; then
    [ -r "$SITE_VENV/bin/activate" ] || { echo "SITE_VENV=$SITE_VENV is no virtual environment on $(uname -n)" >&2; return 1; }
    . "$SITE_VENV/bin/activate"
fi
set $site_unset
