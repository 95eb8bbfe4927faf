#!/bin/sh
# install.sh build       builds programs, man pages and the programs' bill of materials into $OUT/bin (OUT: default this folder)
# install.sh install     builds, and installs all below $DESTDIR (default: this host). Nothing is started or reloaded.
# install.sh uninstall   removes what install would put below the same $DESTDIR, $PREFIX, $SYSTEMD_PREFIX and $SYSCONFDIR
# install.sh packages    makes a .deb and an .rpm in $OUT/build, for $GOARCH (default: this machine's), of $MAINTAINER ("NAME <MAIL>")
# install.sh version     prints the version: $VERSION, else that of the git checkout, else 0.0.0
#
# PREFIX (default /usr) is where programs, man pages and completions go: the units then name $PREFIX/lib/berth.
#
# What others look for in fixed places stays there whatever PREFIX is. systemd reads units, generators, sysctl.d, tmpfiles.d and
# modules-load.d only below /usr/lib and /usr/local/lib (systemd.unit(5), systemd.generator(7), sysctl.d(5)): SYSTEMD_PREFIX (default
# /usr) is for distributions whose systemd is told other places. needrestart reads /etc/needrestart/conf.d: SYSCONFDIR (default /etc).
# A vendor's goal state is always /usr/lib/berth/goal.toml.
set -eu
cd "$(dirname "$0")"

HELPERS="machine-unit nvidia-wire peer-guard record-applied render-config wait-dbus wait-kubelet"
OUT=${OUT:-$PWD}
: "${DESTDIR:=}" "${PREFIX:=/usr}" "${SYSTEMD_PREFIX:=/usr}" "${SYSCONFDIR:=/etc}"
for folder in "$PREFIX" "$SYSTEMD_PREFIX" "$SYSCONFDIR"; do
    case $folder in
    *[!A-Za-z0-9._/+-]* | [!/]* | */) # it becomes part of units
        echo "$0: folder \"$folder\": want an absolute path of A-Z a-z 0-9 . _ + - without a slash at its end" >&2
        exit 2
        ;;
    esac
done
case $DESTDIR in
"" | /*) ;;
*) # relative to which folder?
    echo "$0: DESTDIR \"$DESTDIR\": want an absolute path" >&2
    exit 2
    ;;
esac

version() {
    # As git describes it, in a form that sorts after the release in both kinds of package: 1.2.0+3.g0123456789ab. The checkout may
    # belong to another user than the one who builds.
    described=${VERSION:-$(git -c safe.directory='*' describe --tags --match='v[0-9]*' --abbrev=12 --dirty=.dirty 2>/dev/null ||
        git -c safe.directory='*' describe --always --abbrev=12 --dirty=.dirty 2>/dev/null | sed 's/^/0.0.0-0-g/')}
    echo "${described:-0.0.0}" | sed 's/^v//; s/-\([0-9]*\)-g/+\1.g/'
}

build() {
    # Static and reproducible: the same source, version and folders give the same bytes wherever they are built.
    export CGO_ENABLED=0
    flags="-s -w -X berth/helpers/step.version=$(version)
        -X berth/templates.LibDir=$PREFIX/lib/berth -X berth/generator/plan.unitDir=$SYSTEMD_PREFIX/lib/systemd/system"
    go build -trimpath -buildvcs=false -ldflags="$flags" -o "$OUT/bin/berth-generator" ./generator
    go build -trimpath -buildvcs=false -ldflags="$flags" -o "$OUT/bin/" ./generator/berth ./helpers/...
    texts
    set -- "$OUT/bin/berth" "$OUT/bin/berth-generator"
    for helper in $HELPERS; do
        set -- "$@" "$OUT/bin/$helper"
    done
    env -u GOOS -u GOARCH go run ./units/package/sbom "$(version)" "$@" >"$OUT/bin/berth.cdx.json"
}

# texts makes what is installed of the texts in docs/man and units.
texts() {
    rm -rf "$OUT/bin/man" "$OUT/bin/units"
    mkdir -p "$OUT/bin/man" "$OUT/bin/units"
    for page in docs/man/*.md; do
        env -u GOOS -u GOARCH go tool go-md2man -in "$page" -out "$OUT/bin/man/$(basename "$page" .md)"
    done
    for unit in units/*.service units/*.target; do
        sed "s|^\(Exec[A-Za-z]*=-\{0,1\}\)/usr/lib/berth/|\1$PREFIX/lib/berth/|" "$unit" >"$OUT/bin/units/$(basename "$unit")"
    done
}

# each COMMAND: calls COMMAND MODE FOLDER FILE... for all files. This is the one place that knows where files go.
each() {
    "$1" 0755 "$PREFIX/bin" "$OUT/bin/berth"
    for helper in $HELPERS; do
        "$1" 0755 "$PREFIX/lib/berth" "$OUT/bin/$helper"
    done
    for section in 5 8; do
        "$1" 0644 "$PREFIX/share/man/man$section" "$OUT"/bin/man/*."$section"
    done
    "$1" 0644 "$PREFIX/share/doc/berth" "$OUT/bin/berth.cdx.json"
    "$1" 0644 "$PREFIX/share/bash-completion/completions" units/completion/berth
    "$1" 0644 "$PREFIX/share/zsh/site-functions" units/completion/_berth
    "$1" 0644 "$PREFIX/share/fish/vendor_completions.d" units/completion/berth.fish
    "$1" 0755 "$SYSTEMD_PREFIX/lib/systemd/system-generators" "$OUT/bin/berth-generator"
    "$1" 0644 "$SYSTEMD_PREFIX/lib/systemd/system" "$OUT"/bin/units/*
    "$1" 0644 "$SYSTEMD_PREFIX/lib/sysctl.d" units/sysctl.d/*.conf
    "$1" 0644 "$SYSTEMD_PREFIX/lib/modules-load.d" units/modules-load.d/*.conf
    "$1" 0644 "$SYSTEMD_PREFIX/lib/tmpfiles.d" units/tmpfiles.d/*.conf
    "$1" 0644 "$SYSCONFDIR/needrestart/conf.d" units/needrestart/*.conf
}

into() {
    mode=$1 folder=$DESTDIR$2
    shift 2
    install -d "$folder"
    install -m "$mode" "$@" "$folder"
}

outof() {
    folder=$DESTDIR$2
    shift 2
    for file; do
        rm -f "$folder/${file##*/}"
    done
    case $folder in
    */lib/berth | */doc/berth | */needrestart/conf.d) rmdir --ignore-fail-on-non-empty "$folder" ;; # the others are not berth's own
    esac
}

packages() {
    VERSION=$(version)
    GOARCH=${GOARCH:-$(go env GOARCH)}
    SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -c safe.directory='*' log -1 --format=%ct 2>/dev/null || echo 0)}
    MAINTAINER=${MAINTAINER:-"unknown <root@localhost>"}
    DESTDIR=$OUT/build/root PREFIX=/usr SYSTEMD_PREFIX=/usr SYSCONFDIR=/etc
    export VERSION GOARCH SOURCE_DATE_EPOCH MAINTAINER
    rm -rf "$DESTDIR"
    build
    each into
    gzip -9 --no-name "$DESTDIR"/usr/share/man/man*/*
    find "$DESTDIR" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
    for format in deb rpm; do
        # nfpm runs on this machine, also where the programs are for another.
        env -u GOOS -u GOARCH ARCH="$GOARCH" TREE="$DESTDIR" \
            go run github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.1 package --packager "$format" --target "$OUT/build"
    done
}

case ${1:-} in
build) build ;;
install)
    build
    each into
    ;;
uninstall)
    texts # for their names
    each outof
    ;;
packages) packages ;;
version) version ;;
*)
    echo "usage: $0 build|install|uninstall|packages|version" >&2
    exit 2
    ;;
esac
