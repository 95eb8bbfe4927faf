#!/bin/sh
# install.sh build     builds the programs into bin/
# install.sh install   builds, and installs everything below $DESTDIR (default: this host). Nothing is started or reloaded.
set -eu
cd "$(dirname "$0")"

build() {
    # Static and reproducible: the same source gives the same bytes wherever it is built.
    export CGO_ENABLED=0
    go build -trimpath -ldflags=-s\ -w -o bin/berth-generator ./generator
    go build -trimpath -ldflags=-s\ -w -o bin/berth ./generator/berth
    go build -trimpath -ldflags=-s\ -w -o bin/ ./helpers/...
}

into() { # MODE FOLDER FILE...
    mode=$1 folder=${DESTDIR:-}$2
    shift 2
    install -d "$folder"
    install -m "$mode" "$@" "$folder"
}

case ${1:-} in
build) build ;;
install)
    build
    into 0755 /usr/bin bin/berth
    into 0755 /usr/lib/berth bin/peer-guard bin/render-config bin/wait-dbus bin/nvidia-wire bin/machine-unit bin/wait-kubelet
    into 0755 /usr/lib/systemd/system-generators bin/berth-generator
    into 0644 /usr/lib/systemd/system units/*.service
    into 0644 /usr/lib/sysctl.d units/sysctl.d/*.conf
    into 0644 /usr/lib/modules-load.d units/modules-load.d/*.conf
    into 0644 /usr/lib/tmpfiles.d units/tmpfiles.d/*.conf
    into 0644 /etc/needrestart/conf.d units/needrestart/*.conf
    ;;
*)
    echo "usage: $0 build|install" >&2
    exit 2
    ;;
esac
