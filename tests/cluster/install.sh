#!/bin/sh
# Install what tests/cluster needs: Open MPI, SLURM, munge, ip, sshd, Environment Modules, Chromium, Apptainer, and checkers.
# For root on Debian.
set -eu
# The slow link between cells (net/wan_relay.py) is made of it; containers start without it.
[ -c /dev/net/tun ] || { mkdir -p /dev/net && mknod /dev/net/tun c 10 200; }
packages="openmpi-bin libopenmpi-dev slurm-wlm munge iproute2 openssh-server chromium
    environment-modules shellcheck patchelf"
missing=
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # $missing is a list of words
if [ -n "$missing" ] && ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >"$log" 2>&1
then
    tail -n 40 "$log" >&2
    exit 1
fi
# What runs the workflows over facilities, in an environment of its own.
flow=/opt/streamflow pins=$(dirname "$0")/../../xffl/workflow/templates/requirements.txt
if ! cmp -s "$pins" "$flow/installed"; then
    python3 -m venv --clear "$flow"
    "$flow/bin/pip" install --quiet -r "$pins"
    cp "$pins" "$flow/installed"
fi
# Debian's stable releases have no Apptainer, and what unstable has may not be there on a given day: its tests skip then.
timeout 300 bash "$(dirname "$0")/containers/install.sh" || echo "Apptainer could not be installed; its tests skip" >&2
