# List the recipes.
default:
    @just --list

# Build the programs into bin/.
build:
    ./install.sh build

# Install, for instance: just install DESTDIR=/tmp/image PREFIX=/usr/local
install *VARIABLES:
    env {{VARIABLES}} ./install.sh install

# Remove what install has put there, given the same variables.
uninstall *VARIABLES:
    env {{VARIABLES}} ./install.sh uninstall

# Make a .deb and an .rpm in build/.
packages:
    ./install.sh packages

# Run all tests, by the README's own command; those in the lab need root.
test:
    .ci/run test

# Run every fuzz test for a time each, for instance: just fuzz 5m
fuzz TIME="1m" NAME="":
    .ci/run fuzz {{TIME}} "{{NAME}}"

# Run real kubelets against a real control plane, for instance: just real -run TestReal/trixie
real *ARGUMENTS:
    .ci/run real {{ARGUMENTS}}

# Kill everything at all moments, for instance: just faults -seed=42
faults *ARGUMENTS:
    .ci/run faults {{ARGUMENTS}}

# Measure how fast berth is beside systemd alone, for instance: just bench -run TestSpeed/trixie
bench *ARGUMENTS:
    .ci/run bench {{ARGUMENTS}}

# Show a node start in the lab, for instance: just demo bookworm
demo SUITE="trixie":
    go run ./testdata/lab/cmd/lab demo {{SUITE}}

# Rewrite the golden files.
golden:
    go test -p 1 ./generator ./generator/bake ./generator/cli ./generator/goalstate ./generator/status ./helpers/render -update

# Everything that has an opinion about the source.
lint:
    .ci/run lint
