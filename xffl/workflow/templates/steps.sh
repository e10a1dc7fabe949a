#!/usr/bin/env bash
# One step of a workflow: bash steps.sh STEP --NAME VALUE ... -- WORD ...
# Each has a .cwl file of its name. A step whose result stands there whole does nothing, so to start again is to go on.
# shellcheck disable=SC2154 # the names are declared in a loop
set -eo pipefail

declare -A xffl_step=([step]=$1 [start]='' [metrics]='') # what the step is given; a site's script has other names
shift
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    xffl_step[${1#--}]=$2
    shift 2
done
[ $# -eq 0 ] || shift
unset HOME # which CWL has set to the step's own folder
export HOME=~

aggregate_options=() # what this machine's script adds to xffl aggregate, such as --combine with a name of one's own
make_environment() { # what this facility needs before xffl; without this script's words and settings
    set +e
    # shellcheck source=/dev/null
    . "${xffl_step[site]}"
}
make_environment
set -euo pipefail

for name in home cell project configuration round rounds first start metrics results address lighthouse; do
    declare "$name=${xffl_step[$name]:-}"
done
for name in round rounds first; do # bash would run what stands in brackets in a number
    [[ ${!name:-0} =~ ^[0-9]+$ ]] || { echo "--$name is ${!name@Q}; give a number" >&2 && exit 2; }
done
case $home in /*) ;; *) home=$HOME/$home ;; esac

# Rounds over files

give() { # FOLDER NAME: make it this step's result; no copy where the file system has links
    cp -al "$1" "$2" 2>/dev/null || { rm -rf "$2" && cp -a "$1" "$2"; }
}

alone() { # FOLDER: wait for the step of an earlier start that is still at work there, whose result is taken then
    mkdir -p "$1"
    exec 9>"$1/.lock"
    flock 9 || echo "no locks in $1: see that no other job is at work there" >&2
}

train() { # at a facility: the local steps of a round, and what the round would average
    alone "$home"
    xffl exec --cell "$cell" ${start:+--from "$start"} --export "$home/export" "$project/$configuration" \
        --federation.round "$round" --experiment.output_dir "$home/run" "$@"
    give "$home/export" export
}

measure() { # at a facility: what the global model is worth
    alone "$home/measured"
    xffl exec --cell "$cell" ${start:+--from "$start"} --measure "$home/measured/metrics.json" \
        "$project/$configuration" "$@"
    cp "$home/measured/metrics.json" metrics.json
}

begin() { # where the rounds are made: the last whole round, from which to go on
    alone "$results"
    local last
    last=$(xffl workflow begin "$results" --first "$first" --rounds "$rounds")
    [ -z "$last" ] || give "$last" start
}

aggregate() { # where the rounds are made: the round, of all exports
    alone "$results"
    [ -z "$metrics" ] || xffl workflow record "$results" "$metrics"
    xffl aggregate "$@" "${aggregate_options[@]}" --out "$results/round_$round" --state "$results/server" --start "$results/round_0"
    give "$results/round_$round" model
    local more=false
    [ "$round" -ge "$rounds" ] || more=true
    printf '{"model": {"class": "Directory", "location": "model"}, "round": %d, "more": %s}\n' $((round + 1)) $more \
        >cwl.output.json
}

record() { # where the rounds are made: keep what was measured
    xffl workflow record "$results" "$metrics"
    cp "$metrics" metrics.json
}

# An elastic run: one job for each facility

lighthouse() { # where all facilities reach it; it outlives this step, and holds the lock as long as it runs
    mkdir -p "$home"
    exec 8>>"$home/lighthouse.lock"
    if flock -n 8; then
        : >"$home/lighthouse.log"
        setsid xffl lighthouse --bind "$address" --token-file "${XFFL_TOKEN_FILE:?}" --heartbeat-timeout 2 \
            --join-timeout 20 --journal "$home/journal" </dev/null >"$home/lighthouse.log" 2>&1 &
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
    alone "$home/locks/$run"
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
