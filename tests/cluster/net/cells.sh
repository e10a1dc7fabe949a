#!/bin/bash
# cells.sh up|down|exec NODE COMMAND...: two cells of hosts as network namespaces, joined by one slow link. For root; needs
# ip and /dev/net/tun.
#   NET_DIR         state directory, made by "up" and removed by "down", which ends what runs on the nodes
#   NET_PREFIX      what the namespaces' names begin with: one of its own for each pair of cells that is up (net)
#   NET_NODES       nodes of a cell (2)
#   NET_HEAD        1: a host "head" as well, at 10.77.1.253 in the first cell, where users would log in
#   NET_RATE_MBIT   rate of the link, each way (200)
#   NET_DELAY_MS    delay of the link, one way (10)
#   NET_QUEUE_MS    what the link's queues hold before they drop packets (100)
#   NET_CONGESTION  TCP's congestion control between the cells (the kernel's choice)
#   NET_PYTHON      interpreter for the link's relay (python3)
# Nodes are $NET_PREFIX-a1 ..., $NET_PREFIX-b1 ..., with eth0 at 10.77.1.1 ..., 10.77.2.1 ...; a cell is a bridge in
# $NET_PREFIX-sa and $NET_PREFIX-sb. The slow link is the device "wan" of those two: its counters see all that crosses.
# "exec" runs a command on a node, under the host name a1 ..., where these names resolve.
# Nothing is changed outside of the namespaces and NET_DIR.
set -eu
dir=${NET_DIR:?state directory} prefix=${NET_PREFIX:-net} nodes=${NET_NODES:-2}
here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/sbin

write() { ip netns exec "$1" sh -c "test ! -e $2 || echo $3 >$2"; }

namespace() {
    ip netns add "$1"
    ip -n "$1" link set lo up
    for which in all default; do # IPv6 would speak up by itself, and be counted
        write "$1" /proc/sys/net/ipv6/conf/$which/disable_ipv6 1
    done
}

node() { # name, its cell's switch, its port there, address, gateway
    namespace "$1"
    ip -n "$1" link add eth0 type veth peer name "$3" netns "$2"
    ip -n "$2" link set "$3" master bridge up
    ip -n "$1" addr add "$4/24" dev eth0
    ip -n "$1" link set eth0 up
    # Nothing else is routed: a look-up of a host's name ends at once, and not in a time-out.
    # shellcheck disable=SC2086 # two words or none
    ip -n "$1" route add 10.77.0.0/16 via "$5" ${NET_CONGESTION:+congctl $NET_CONGESTION}
}

cell() { # letter, number
    local switch=$prefix-s$1 i
    namespace "$switch"
    write "$switch" /proc/sys/net/ipv4/ip_forward 1
    ip -n "$switch" link add bridge type bridge
    ip -n "$switch" addr add "10.77.$2.254/24" dev bridge
    ip -n "$switch" link set bridge up
    for i in $(seq "$nodes"); do node "$prefix-$1$i" "$switch" "port$i" "10.77.$2.$i" "10.77.$2.254"; done
}

join() { # switch, its address on the link, the other's, the net behind it
    ip -n "$1" addr add "$2" peer "$3" dev wan
    ip -n "$1" link set wan txqueuelen 2000 up
    ip -n "$1" route add "$4" via "$3"
}

hosts() {
    local i
    printf '127.0.0.1 localhost\n10.77.1.253 head\n'
    for i in $(seq "$nodes"); do printf '10.77.1.%d a%d\n10.77.2.%d b%d\n' "$i" "$i" "$i" "$i"; done
}

up() {
    mkdir -p "$dir"
    hosts >"$dir/hosts"
    cell a 1
    cell b 2
    if [ "${NET_HEAD:-0}" = 1 ]; then node "$prefix-head" "$prefix-sa" head 10.77.1.253 10.77.1.254; fi
    "${NET_PYTHON:-python3}" "$here/wan_relay.py" "$prefix-sa" "$prefix-sb" --rate-mbit "${NET_RATE_MBIT:-200}" \
        --delay-ms "${NET_DELAY_MS:-10}" --queue-ms "${NET_QUEUE_MS:-100}" >"$dir/relay.pid"
    join "$prefix-sa" 10.77.0.1 10.77.0.2 10.77.2.0/24
    join "$prefix-sb" 10.77.0.2 10.77.0.1 10.77.1.0/24
}

down() {
    local name
    if [ -s "$dir/relay.pid" ]; then kill "$(cat "$dir/relay.pid")" || true; fi
    for name in $(ip netns list | cut -d ' ' -f 1 | grep "^$prefix-" || true); do
        ip netns pids "$name" | xargs -r kill -9 2>/dev/null || true
        ip netns del "$name"
    done
    rm -rf "$dir"
}

on_node() { # node, command and its arguments
    local node=$1
    shift
    # "ip netns exec" gives mounts of its own already: nobody else sees this file of hosts.
    # shellcheck disable=SC2016 # for the inner shell to expand
    exec ip netns exec "$prefix-$node" unshare --uts \
        sh -c 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"' sh "$node" "$dir/hosts" "$@"
}

case ${1:-} in
    up | down) "$1" ;;
    exec) shift; on_node "$@" ;;
    *) sed -n 2,17p "$0" >&2; exit 2 ;;
esac
