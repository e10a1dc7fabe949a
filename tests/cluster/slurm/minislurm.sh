#!/bin/bash
# minislurm.sh up|down: a throw-away SLURM cluster on this host, with virtual nodes in cells behind a tree of switches.
# Needs root and Debian's slurm-wlm and munge; no systemd, cgroup, accounting, or file in /etc.
#   MS_DIR    state directory, made by "up" and removed by "down"
#   MS_CELLS  cells and their nodes, such as "a:2 b:2" (nodes a1 a2 b1 b2); one switch for each cell
#   MS_LEAF   nodes on each leaf switch (a_s1, a_s2, ... below cell_a); by default the cell's switch is the only one
#   MS_GPUS   devices that stand for the GPUs of each node, such as "/dev/null /dev/zero"; by default none
#   MS_PORTS  free ports: one for the controller, then one for each node
#   MS_FIRST_JOB  number of the first job, 1 by default
#   MS_NET    1: the nodes are the hosts of ../net/cells.sh (up with NET_HEAD=1 before; NET_DIR and NET_PREFIX as there),
#             its head runs the controller, and SLURM's commands, too, have to run there; no ports are needed
# After "up": export SLURM_CONF=$MS_DIR/slurm.conf
set -eu
dir=${MS_DIR:?state directory} cells=${MS_CELLS:-a:2 b:2}
PATH=$PATH:/usr/sbin
export SLURM_CONF=$dir/slurm.conf
net=${MS_NET:-0} net_cells=$(cd "$(dirname "$0")/../net" && pwd)/cells.sh

on() { # host of the net, command and its arguments: there, or here where all nodes are this host
    local host=$1
    shift
    if [ "$net" = 1 ]; then "$net_cells" exec "$host" "$@"; else "$@"; fi
}

address() { # node of the net
    on "$1" ip -o -4 addr show dev eth0 | sed 's|.* inet \([0-9.]*\)/.*|\1|'
}

nodes() { for cell in $cells; do for i in $(seq 1 "${cell#*:}"); do echo "${cell%%:*}$i"; done; done; }

# cred_expire is also how long a job waits that goes back into the queue: two minutes by default.
write_configuration() {
    local host=head controller
    if [ "$net" = 1 ]; then
        controller=$(address head)
        set -- 6817
    else
        host=$(hostname -s) controller=127.0.0.1
        # shellcheck disable=SC2086 # a list of words
        set -- ${MS_PORTS:?free ports}
    fi
    cat <<END
ClusterName=mini
SlurmctldHost=$host($controller)
SlurmctldPort=$1
FirstJobId=${MS_FIRST_JOB:-1}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
TmpFS=$dir/tmp.%n
SwitchType=switch/none
MpiDefault=none
PlugStackConfig=$dir/plugstack.conf
TopologyPlugin=topology/tree
ReturnToService=2
InactiveLimit=0
KillWait=5
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000
END
    shift
    local gpus=
    if [ -n "${MS_GPUS:-}" ]; then
        echo "GresTypes=gpu"
        gpus="Gres=gpu:$(echo "$MS_GPUS" | wc -w)"
    fi
    for node in $(nodes); do
        if [ "$net" = 1 ]; then
            echo "NodeName=$node NodeAddr=$(address "$node") Port=6818 CPUs=4 $gpus RealMemory=1000 State=UNKNOWN"
            continue
        fi
        echo "NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$1 CPUs=4 $gpus RealMemory=1000 State=UNKNOWN"
        shift
    done
    echo "PartitionName=all Nodes=$(nodes | paste -sd,) Default=YES MaxTime=60 State=UP OverSubscribe=NO"
}

write_topology() {
    local switches='' cell name count leaf first last leaves
    for cell in $cells; do
        name=${cell%%:*} count=${cell#*:} leaves=
        switches=$switches${switches:+,}cell_$name
        if [ -z "${MS_LEAF:-}" ]; then
            echo "SwitchName=cell_$name Nodes=${name}[1-$count]"
            continue
        fi
        for leaf in $(seq 1 $(((count + MS_LEAF - 1) / MS_LEAF))); do
            first=$(((leaf - 1) * MS_LEAF + 1)) last=$((leaf * MS_LEAF < count ? leaf * MS_LEAF : count))
            echo "SwitchName=${name}_s$leaf Nodes=${name}[$first-$last]"
            leaves=$leaves${leaves:+,}${name}_s$leaf
        done
        echo "SwitchName=cell_$name Switches=$leaves"
    done
    echo "SwitchName=core Switches=$switches"
}

up() {
    mkdir -p "$dir"/{state,run,log}
    (umask 077; head -c 128 /dev/urandom >"$dir/munge.key")
    # --force: munged refuses a socket and a log below a directory that others may write, such as /tmp
    munged --force --key-file="$dir/munge.key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed" 2>>"$dir/log/munged.err"
    write_configuration >"$dir/slurm.conf"
    write_topology >"$dir/topology.conf"
    : >"$dir/plugstack.conf"
    for device in ${MS_GPUS:-}; do echo "Name=gpu File=$device"; done >"$dir/gres.conf"
    # Naming a plugin keeps slurmd from probing /sys/fs/cgroup; none is used.
    printf 'CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n' >"$dir/cgroup.conf"
    on head slurmctld -f "$SLURM_CONF"
    for node in $(nodes); do
        mkdir -p "$dir/spool.$node" "$dir/tmp.$node"
        on "$node" slurmd -f "$SLURM_CONF" -N "$node"
    done
    local want; want=$(nodes | wc -l)
    for _ in $(seq 100); do
        [ "$(on head sinfo -h -N -p all -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$want" ] && return 0
        sleep 0.2
    done
    grep -E 'error|fatal' "$dir"/log/*.log | tail -n 20 >&2 || true
    echo "the nodes did not come up" >&2
    exit 1
}

alive() { for pid in $1; do grep -qs '^State:.[^ZX]' "/proc/$pid/status" && echo "$pid"; done; true; }

kill_tree() {
    for child in $(cat "/proc/$1/task"/*/children 2>/dev/null); do kill_tree "$child"; done
    kill -9 "$1" 2>/dev/null || true
}

down() {
    [ -d "$dir/run" ] || return 0
    on head scancel -u root 2>/dev/null || true
    local pids; pids=$(cat "$dir"/run/{slurmd.*,slurmctld,munged}.pid 2>/dev/null || true)
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    for _ in $(seq 50); do [ -z "$(alive "$pids")" ] && break; sleep 0.1; done
    for pid in $(alive "$pids"); do kill -9 "$pid" 2>/dev/null || true; done
    # A step's manager outlives its slurmd: end those that still hold a file of ours, with what they started.
    for process in /proc/[0-9]*; do
        [ "$(cat "$process/comm" 2>/dev/null)" = slurmstepd ] || continue
        ls -l "$process/fd" 2>/dev/null | grep -qF " $dir/" && kill_tree "${process#/proc/}" || true
    done
    rm -rf "$dir"
}

case ${1:-} in up) up ;; down) down ;; *) sed -n 2,12p "$0"; exit 2 ;; esac
