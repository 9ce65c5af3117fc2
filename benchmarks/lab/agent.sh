#!/bin/sh
# agent.sh LAB HOST COMMAND...: run a line of shell on a host of the lab: in its network, within
# its CPU share, under its name. HOST is a host's number or address. It is mpirun's rsh agent too.
lab=$1 host=${2##*.}
shift 2
for tasks in "/sys/fs/cgroup/cpu/$lab$host/tasks" "/sys/fs/cgroup/$lab$host/cgroup.procs"; do
    if [ -w "$tasks" ]; then echo $$ > "$tasks"; fi
done
# Horovod and MPI ask for the host's own name and what it resolves to.
# shellcheck disable=SC2016
exec nsenter --net="/run/netns/$lab$host" unshare --uts --mount /bin/sh -c '
    echo "$1" > /proc/sys/kernel/hostname &&
    mount --bind "/run/$2.lab.hosts" /etc/hosts &&
    exec /bin/sh -c "$3"' sh "$lab$host" "$lab" "$*"
