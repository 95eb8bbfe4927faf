# Makes the base of a lab host in $DIR: host/ and machine/. Runs as `sh -eu` in mount and PID name spaces of its own, a
# step a call.
# shellcheck shell=sh

# in_root ROOT COMMAND...: runs a command in a root file system, with this machine's downloads and resolver.
in_root() {
    root=$1
    shift
    mount -t proc proc "$root/proc"
    mount --bind "$DEBS" "$root/var/cache/apt/archives"
    chroot "$root" "$@"
    umount "$root/proc" "$root/var/cache/apt/archives"
}

install_in() {
    root=$1
    shift
    # Nobody needs these bytes to survive a crash of this machine: a base is either complete or thrown away.
    in_root "$root" apt-get -q -y --no-install-recommends -o Dpkg::Options::=--force-unsafe-io \
        -o APT::Keep-Downloaded-Packages=true install "$@"
}

# configure_root ROOT: what the host and the machine have in common.
configure_root() {
    root=$1
    rm -rf "$root"/var/lib/apt/lists/* "$root"/var/log/*.log "$root/var/log/apt"
    rm -f "$root"/var/cache/apt/*.bin "$root/etc/hostname"
    # Empty rather than absent: every host gets an id of its own, and yet its boot is no "first boot", which would enable
    # every unit that a preset names (machine-id(5)).
    : >"$root/etc/machine-id"
    rm -f "$root/var/lib/dbus/machine-id"
    : >"$root/etc/fstab"
    printf '127.0.0.1 localhost\n::1 localhost\n' >"$root/etc/hosts"
    mkdir -p "$root/usr/lib/modules"
    # Timers of apt and dpkg would begin work in the middle of a test.
    systemctl --root="$root" mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
        fstrim.timer e2scrub_reap.service
    systemctl --root="$root" disable systemd-networkd.service systemd-networkd-wait-online.service getty@tty1.service
}

case $1 in
debootstrap)
    # debootstrap of an older release knows no newer suites; they need no other steps than sid.
    script=/usr/share/debootstrap/scripts/$SUITE
    [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
    debootstrap --variant=minbase --include="$(echo "$COMMON" | tr ' ' ,)" --cache-dir="$DEBS" \
        --keyring=/usr/share/keyrings/debian-archive-keyring.gpg "$SUITE" "$DIR/host" "$MIRROR" "$script"
    (cd "$DIR/host" && rm -rf usr/share/doc/* usr/share/man/* usr/share/locale/* var/cache/apt/archives/*.deb)
    ;;
packages)
    # The Release files of a suite that is not released yet expire after a week; mirrors and snapshots may be older.
    in_root "$DIR/host" apt-get -q -o Acquire::Check-Valid-Until=false update
    cp -a --reflink=auto "$DIR/host" "$DIR/machine"
    # shellcheck disable=SC2086 # package lists
    install_in "$DIR/host" $HOST
    # shellcheck disable=SC2086
    install_in "$DIR/machine" $MACHINE
    ;;
configure)
    configure_root "$DIR/host"
    configure_root "$DIR/machine"
    # A persistent journal, so that a test can read the one of the boot before.
    mkdir -p "$DIR/host/var/log/journal" "$DIR/host/var/lib/machines/node-a" "$DIR/host/var/lib/machines/node-b"
    # The host has no network but loopback, yet programs want a resolver to be named: one that is for documentation (RFC 5737).
    echo 'nameserver 192.0.2.53' >"$DIR/host/etc/resolv.conf"
    # What runs in the machine is up to the test.
    systemctl --root="$DIR/machine" disable containerd.service
    rm -f "$DIR/machine/etc/resolv.conf"
    ;;
esac
