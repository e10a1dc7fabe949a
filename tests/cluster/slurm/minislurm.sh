#!/bin/bash
# minislurm.sh up|down: a throw-away SLURM cluster on this host, with virtual nodes in cells behind a tree of switches.
# Needs root and Debian's slurm-wlm and munge; no systemd, cgroup, accounting, or file in /etc.
#   MS_DIR    state directory, made by "up" and removed by "down"
#   MS_CELLS  cells and their nodes, such as "a:2 b:2" (nodes a1 a2 b1 b2); one leaf switch for each cell
#   MS_PORTS  free ports: one for the controller, then one for each node
# After "up": export SLURM_CONF=$MS_DIR/slurm.conf
set -eu
dir=${MS_DIR:?state directory} cells=${MS_CELLS:-a:2 b:2}
PATH=$PATH:/usr/sbin
export SLURM_CONF=$dir/slurm.conf

nodes() { for cell in $cells; do for i in $(seq 1 "${cell#*:}"); do echo "${cell%%:*}$i"; done; done; }

write_configuration() {
    local host; host=$(hostname -s)
    set -- ${MS_PORTS:?free ports}
    cat <<END
ClusterName=mini
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
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
    for node in $(nodes); do
        echo "NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$1 CPUs=4 RealMemory=1000 State=UNKNOWN"
        shift
    done
    echo "PartitionName=all Nodes=$(nodes | paste -sd,) Default=YES MaxTime=60 State=UP OverSubscribe=NO"
}

write_topology() {
    local switches=
    for cell in $cells; do
        echo "SwitchName=cell_${cell%%:*} Nodes=${cell%%:*}[1-${cell#*:}]"
        switches=$switches${switches:+,}cell_${cell%%:*}
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
    # Naming a plugin keeps slurmd from probing /sys/fs/cgroup; none is used.
    printf 'CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n' >"$dir/cgroup.conf"
    slurmctld -f "$SLURM_CONF"
    for node in $(nodes); do
        mkdir -p "$dir/spool.$node" "$dir/tmp.$node"
        slurmd -f "$SLURM_CONF" -N "$node"
    done
    local want; want=$(nodes | wc -l)
    for _ in $(seq 100); do
        [ "$(sinfo -h -N -p all -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$want" ] && return 0
        sleep 0.2
    done
    tail -n 5 "$dir"/log/*.log >&2
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
    scancel -u root 2>/dev/null || true
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

case ${1:-} in up) up ;; down) down ;; *) sed -n 2,8p "$0"; exit 2 ;; esac
