#!/bin/bash
# facilities.sh up|down: network namespaces that stand for facilities. This host reaches each of them, as those do who
# log in; between them there is no way: none has a route but to this host's end of its own link, which forwards nothing.
#   FAC_PREFIX  names are FAC_PREFIX-a, FAC_PREFIX-b; short, since interfaces have the same
#   FAC_NET     the first two numbers of their addresses, such as 10.78: a has 10.78.1.2 and b 10.78.2.2
# After "up": ip netns exec FAC_PREFIX-a COMMAND
set -eu
prefix=${FAC_PREFIX:?prefix} net=${FAC_NET:?addresses}

up() {
    local number=0 name space
    for name in a b; do
        number=$((number + 1)) space=$prefix-$name
        ip netns add "$space"
        ip -n "$space" link set lo up
        ip link add "$space" type veth peer name eth0 netns "$space"
        ip addr add "$net.$number.1/30" dev "$space"
        ip link set "$space" up
        ip -n "$space" addr add "$net.$number.2/30" dev eth0
        ip -n "$space" link set eth0 up
    done
}

down() {
    local name
    for name in a b; do
        # shellcheck disable=SC2046 # numbers
        kill -9 $(ip netns pids "$prefix-$name" 2>/dev/null) 2>/dev/null || true
        ip netns del "$prefix-$name" 2>/dev/null || true
    done
}

case ${1:-} in up) up ;; down) down ;; *) sed -n 2,7p "$0"; exit 2 ;; esac
