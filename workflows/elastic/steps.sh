#!/usr/bin/env bash
# One step of an elastic run over facilities: bash steps.sh STEP --NAME VALUE ... -- WORD ...
# Each has a .cwl file of its name. To start the workflow again is to go on.
# shellcheck disable=SC2154 # the names are declared in a loop
set -eo pipefail

declare -A xffl_step=([step]=$1) # what the step is given; a site's script has other names
shift
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    xffl_step[${1#--}]=$2
    shift 2
done
[ $# -eq 0 ] || shift
unset HOME # which CWL has set to the step's own folder
export HOME=~

make_environment() { # what this facility needs before xffl; without this script's words and settings
    set +e
    # shellcheck source=/dev/null
    . "${xffl_step[site]}"
}
make_environment
set -euo pipefail

for name in home address cell lighthouse project configuration; do
    declare "$name=${xffl_step[$name]:-}"
done
case $home in /*) ;; *) home=$HOME/$home ;; esac
mkdir -p "$home"

lighthouse() { # where all facilities reach it; it outlives this step, and holds the lock as long as it runs
    exec 8>>"$home/lighthouse.lock"
    if flock -n 8; then
        : >"$home/lighthouse.log"
        setsid xffl lighthouse --bind "$address" --token-file "${XFFL_TOKEN_FILE:?}" --heartbeat-timeout 2 \
            --join-timeout 20 </dev/null >"$home/lighthouse.log" 2>&1 &
        echo $! >"$home/lighthouse.pid"
        until grep -q "^lighthouse at" "$home/lighthouse.log"; do
            kill -0 $! || { cat "$home/lighthouse.log" >&2 && exit 1; }
            sleep 0.2
        done
    fi
    printf '{"url": "http://%s"}\n' "$(sed -n 's/^lighthouse at //p' "$home/lighthouse.log")" >cwl.output.json
}

cell() { # at a facility: one job for the whole run; gives the records and the last checkpoint
    local run=cell_${cell%/*}
    exec 9>"$home/$run.lock"
    flock 9 || echo "no locks in $home: see that no other job is at work there" >&2 # the job of an earlier start
    # A facility to which ssh brings the lighthouse has its own address for it.
    xffl exec --elastic "${XFFL_LIGHTHOUSE:-$lighthouse}" --cell "$cell" "$project/$configuration" \
        --experiment.output_dir "$home" "$@"
    mkdir -p "$run/checkpoints"
    cp -a "$home/$run/metrics" "$run"
    cp -a "$home/$run/checkpoints/final" "$run/checkpoints"
}

consolidate() { # where the lighthouse is: the model of the cell with the most rounds
    mkdir runs
    ln -s "$@" runs
    xffl consolidate runs model
    kill "$(cat "$home/lighthouse.pid")" || echo "the lighthouse had ended already" >&2
}

"${xffl_step[step]}" "$@"
