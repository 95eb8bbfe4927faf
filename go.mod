module berth

go 1.26.0

require github.com/coreos/go-systemd/v22 v22.7.0

require (
	github.com/pelletier/go-toml/v2 v2.4.3 // indirect
	go.yaml.in/yaml/v2 v2.4.2 // indirect
	sigs.k8s.io/yaml v1.6.0 // indirect
)
