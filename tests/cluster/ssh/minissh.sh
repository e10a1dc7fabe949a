#!/bin/bash
# minissh.sh up|down: a throw-away sshd on each of several loopback addresses, which stand for hosts.
# Needs OpenSSH's sshd, which is never started as a service; keys, configuration and logs lie in the state folder only.
#   SS_DIR    state folder, made by "up" and removed by "down"
#   SS_SETENV  variables of those who log in, such as "A=1 B=2"
#   SS_HOSTS  addresses and ports, such as "127.0.0.2:22022 127.0.0.3:22022"
# After "up": ssh -F "$SS_DIR/config" 127.0.0.2
set -eu
dir=${SS_DIR:?state folder} hosts=${SS_HOSTS:-}
PATH=$PATH:/usr/sbin

up() {
    mkdir -p "$dir"
    chmod 700 "$dir"
    ssh-keygen -q -t ed25519 -N '' -C minissh -f "$dir/id"
    ssh-keygen -q -t ed25519 -N '' -C minissh-host -f "$dir/host"
    cp "$dir/id.pub" "$dir/authorized_keys"
    [ "$(id -u)" != 0 ] || mkdir -p /run/sshd # where sshd gives up its privileges
    for host in $hosts; do
        local address=${host%:*} port=${host##*:}
        cat >"$dir/sshd.$address.conf" <<END
Port $port
ListenAddress $address
HostKey $dir/host
AuthorizedKeysFile $dir/authorized_keys
PidFile $dir/sshd.$address.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
END
        [ -z "${SS_SETENV:-}" ] || echo "SetEnv $SS_SETENV" >>"$dir/sshd.$address.conf"
        "$(command -v sshd)" -f "$dir/sshd.$address.conf" -E "$dir/sshd.$address.log"
        echo "[$address]:$port $(cut -d' ' -f1,2 "$dir/host.pub")" >>"$dir/known_hosts"
        printf 'Host %s\n    Port %s\n' "$address" "$port" >>"$dir/config"
    done
    cat >>"$dir/config" <<END
Host *
    IdentityFile "$dir/id"
    IdentitiesOnly yes
    UserKnownHostsFile "$dir/known_hosts"
    GlobalKnownHostsFile none
    BatchMode yes
    StrictHostKeyChecking yes
    ConnectTimeout 5
END
    for host in $hosts; do
        for _ in $(seq 100); do
            ssh -F "$dir/config" "${host%:*}" true 2>"$dir/error" && break
            sleep 0.05
        done
        ssh -F "$dir/config" "${host%:*}" true
    done
}

down() {
    for file in "$dir"/sshd.*.pid; do [ ! -s "$file" ] || kill "$(cat "$file")" 2>/dev/null || true; done
    rm -rf "$dir"
}

case ${1:-} in up) up ;; down) down ;; *) sed -n 2,7p "$0"; exit 2 ;; esac
