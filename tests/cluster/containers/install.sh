#!/bin/bash
# install.sh [FOLDER]: put Debian's Apptainer into a folder (/opt/apptainer). For root on Debian.
# Only Debian's unstable release has it. Its C library is newer than a stable one's: it is taken along, for Apptainer only.
# Nothing of the system is changed; apt keeps its lists of that release below the folder while this runs.
set -eu
folder=${1:-/opt/apptainer}
[ -x "$folder/usr/bin/apptainer" ] && exit 0
command -v patchelf >/dev/null
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists,cache,debs,root,libc}/partial
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" >"$work/sources.list"
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$work/debs" && "${apt[@]}" download apptainer/sid libc6/sid libseccomp2/sid libsqlite3-0/sid)
dpkg -x "$work"/debs/apptainer_*.deb "$work/root"
for package in "$work"/debs/lib*.deb; do dpkg -x "$package" "$work/libc"; done
# Apptainer finds its files from where it is, with its settings below usr.
mv "$work/root/etc" "$work/root/usr/etc"
mkdir -p "$work/root/usr/lib/var/lib/apptainer/mnt/session" "$work/root/usr/var/lib/apptainer/mnt/session"
mkdir "$work/root/libc"
cp -a "$work"/libc/usr/lib/x86_64-linux-gnu/. "$work/root/libc"
for program in "$work/root/usr/bin/apptainer" "$work/root/usr/lib/x86_64-linux-gnu/apptainer/bin/starter"; do
    patchelf --set-interpreter "$folder/libc/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$folder/libc" "$program"
done
mkdir -p "$(dirname "$folder")"
rm -rf "$folder"
mv "$work/root" "$folder"
"$folder/usr/bin/apptainer" version
