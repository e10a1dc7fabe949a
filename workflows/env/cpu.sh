# shellcheck shell=sh
# The environment of a site of CPU nodes.
# For ". cpu.sh" in a job script, for "slurm.setup" of xffl submit, and for workflows/mpi and workflows/ssh, which read
# it on every host. Any POSIX shell reads it, "set -eu" or not. What is set already stays, unless it says so below.

# ---- Change these for your site, or set them outside.

# The MPI that the site has built for its network, as "module avail" lists it; only mpirun needs it.
SITE_MODULES="${SITE_MODULES-}"    # openmpi/5.0

# The virtual environment that has xffl, in a folder that all hosts see.
SITE_VENV="${SITE_VENV-}"    # /work/project/venv

# The fast network's interface, for rank 0's address and gloo ("xffl doctor" lists interfaces). Without it the
# address of the host's name is taken, which is often that of a slow network for logging in.
export XFFL_IFNAME="${XFFL_IFNAME-}"    # ib0

# ---- The rest is the same at most sites.

# Else torch takes all cores of the node in every rank, and the ranks wait for each other's threads.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# From version 22.05 on, srun no longer takes the job's --cpus-per-task by itself, and binds all of a rank to one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"; fi

# A run for CPUs stays there on nodes that have GPUs, too, whatever SLURM has set: else xffl would take the GPUs.
export CUDA_VISIBLE_DEVICES=""    # HIP reads it as well

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
