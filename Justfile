# The tests' own command, also without just: see README.md.
tests := "go test -timeout 60m ./... ./testdata/lab/..."

# List the recipes.
default:
    @just --list

# Build the programs into bin/.
build:
    ./install.sh build

# Install below DESTDIR, for instance: just install /tmp/image
install DESTDIR="":
    DESTDIR='{{DESTDIR}}' ./install.sh install

# Run all tests; those in the lab need root.
test:
    {{tests}}

# Show a node start in the lab.
demo SUITE="trixie":
    go run ./testdata/lab/cmd/lab demo {{SUITE}}

# Rewrite the golden files.
golden:
    go test ./generator ./generator/goalstate ./helpers/render -update

# Everything that has an opinion about the source.
lint:
    test -z "$(gofmt -l .)"
    go vet ./... ./testdata/lab/...
    go run honnef.co/go/tools/cmd/staticcheck@latest ./... ./testdata/lab/...
    shellcheck install.sh .ci/run
