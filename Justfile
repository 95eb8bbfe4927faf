# List the recipes.
default:
    @just --list

# Build the programs into bin/.
build:
    ./install.sh build

# Install below DESTDIR, for instance: just install /tmp/image
install DESTDIR="":
    DESTDIR='{{DESTDIR}}' ./install.sh install

# Run all tests, by the README's own command; those in the lab need root.
test:
    .ci/run test

# Show a node start in the lab, for instance: just demo bookworm
demo SUITE="trixie":
    go run ./testdata/lab/cmd/lab demo {{SUITE}}

# Rewrite the golden files.
golden:
    go test ./generator ./generator/goalstate ./generator/status ./helpers/render -update

# Everything that has an opinion about the source.
lint:
    .ci/run lint
