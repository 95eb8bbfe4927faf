// Stubkubelet stands in for kubelet where tests need one: it takes kubelet's flags and files, refuses what kubelet would
// refuse (and unknown or duplicate fields, on which kubelet only warns), speaks sd_notify and answers /healthz, but asks
// no API server and runs no pod.
//
// It has a module of its own because it decodes with Kubernetes' types, which berth itself does without.
//
// As with kubelet, wrong flags, a wrong configuration or credential, and a container runtime that does not answer end
// it before READY=1; kernel settings that are off end it only after READY=1, when kubelet starts its container manager.
// What it was given goes to /run/stubkubelet.json.
//
// Files in /etc/stubkubelet make it misbehave:
//
//	fail            print the content as an error and exit with 1 before READY=1
//	exit-after      a duration after READY=1, after which it exits with 1
//	no-notify       never send READY=1
//	no-healthz      do not listen for /healthz
//	healthz-status  the HTTP status of /healthz, read on every request
//	healthz-delay   a duration before /healthz answers, read on every request
//
// STUB_SKIP_SYSCTL=1 leaves the kernel settings unchecked; STUB_ROOT stands for / in the paths named here and /proc/sys.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/validation"
	clientcmdv1 "k8s.io/client-go/tools/clientcmd/api/v1"
	"k8s.io/klog/v2"
	kubeletv1beta1 "k8s.io/kubelet/config/v1beta1"
	"k8s.io/kubelet/pkg/apis"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, os.Getenv("STUB_ROOT"), os.Args[1:]); err != nil {
		klog.ErrorS(err, "command failed")
		klog.Flush()
		os.Exit(1)
	}
}

// options are the flags that kubelet still needs besides its configuration file.
type options struct {
	Config              string `json:"config"`
	Kubeconfig          string `json:"kubeconfig"`
	BootstrapKubeconfig string `json:"bootstrapKubeconfig"`
	HostnameOverride    string `json:"hostnameOverride"`
	NodeIP              string `json:"nodeIP"`
	NodeLabels          string `json:"nodeLabels"`
}

// seen is what /run/stubkubelet.json holds.
type seen struct {
	Flags  options                              `json:"flags"`
	Config *kubeletv1beta1.KubeletConfiguration `json:"config"`
	// Credential is the decoded file of --kubeconfig, or of --bootstrap-kubeconfig if the former does not exist.
	Credential *clientcmdv1.Config `json:"credential"`
}

func run(ctx context.Context, root string, args []string) error {
	k := knobs(filepath.Join("/", root, "etc/stubkubelet"))
	got, err := load(args)
	if err != nil {
		return err
	}
	klog.InfoS("Kubelet version", "kubeletVersion", "v0.0.0-stub") // in kubelet's own words
	if msg, ok := k.get("fail"); ok {
		return errors.New(msg)
	}
	if err := dialRuntime(got.Config.ContainerRuntimeEndpoint); err != nil {
		return fmt.Errorf("failed to run Kubelet: %w", err)
	}
	b, err := json.MarshalIndent(got, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join("/", root, "run/stubkubelet.json"), b, 0o600); err != nil {
		return err
	}

	if _, no := k.get("no-healthz"); !no {
		go serveHealthz(ctx, k, got.Config)
	}
	if _, no := k.get("no-notify"); !no {
		if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
			return err
		}
	}
	klog.InfoS("Started kubelet", "node", got.Flags.HostnameOverride)

	// From here on things happen that kubelet does after READY=1 too.
	if got.Config.ProtectKernelDefaults && os.Getenv("STUB_SKIP_SYSCTL") != "1" {
		if err := checkSysctls(filepath.Join("/", root, "proc/sys")); err != nil {
			return fmt.Errorf("failed to start ContainerManager: %w", err)
		}
	}
	var exit, watchdog <-chan time.Time
	if after, ok := k.get("exit-after"); ok {
		d, err := time.ParseDuration(after)
		if err != nil {
			return fmt.Errorf("exit-after: %w", err)
		}
		exit = time.After(d)
	}
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return err
	}
	if interval > 0 {
		watchdog = time.Tick(interval / 2)
	}
	for {
		select {
		case <-ctx.Done():
			klog.InfoS("Received signal, exiting")
			return nil
		case <-exit:
			return errors.New("exit-after has passed")
		case <-watchdog:
			if _, err := daemon.SdNotify(false, daemon.SdNotifyWatchdog); err != nil {
				klog.ErrorS(err, "Failed to notify systemd watchdog")
			}
		}
	}
}

// load reads and checks everything that the flags name.
func load(args []string) (*seen, error) {
	var o options
	flags := pflag.NewFlagSet("kubelet", pflag.ContinueOnError)
	flags.StringVar(&o.Config, "config", "", "")
	flags.StringVar(&o.Kubeconfig, "kubeconfig", "", "")
	flags.StringVar(&o.BootstrapKubeconfig, "bootstrap-kubeconfig", "", "")
	flags.StringVar(&o.HostnameOverride, "hostname-override", "", "")
	flags.StringVar(&o.NodeIP, "node-ip", "", "")
	flags.StringVar(&o.NodeLabels, "node-labels", "", "")
	flags.Usage = func() {}
	if err := flags.Parse(args); err != nil {
		return nil, fmt.Errorf("failed to parse kubelet flag: %w", err)
	}
	if len(flags.Args()) > 0 {
		return nil, fmt.Errorf("unknown command %+s", flags.Args()[0])
	}

	var errs []error
	if o.HostnameOverride != "" {
		for _, msg := range validation.IsDNS1123Subdomain(o.HostnameOverride) {
			errs = append(errs, fmt.Errorf("--hostname-override %q: %s", o.HostnameOverride, msg))
		}
	}
	if o.NodeIP != "" {
		for ip := range strings.SplitSeq(o.NodeIP, ",") {
			if net.ParseIP(ip) == nil {
				errs = append(errs, fmt.Errorf("bad --node-ip %q", o.NodeIP))
			}
		}
	}
	errs = append(errs, checkLabels(o.NodeLabels)...)
	config, err := loadConfig(o.Config)
	if err != nil {
		errs = append(errs, err)
	}
	credential, err := loadCredential(o)
	if err != nil {
		errs = append(errs, err)
	}
	return &seen{o, config, credential}, utilerrors.NewAggregate(errs)
}

// checkLabels is what kubelet checks of the labels that a node gives itself.
func checkLabels(list string) (errs []error) {
	if list == "" {
		return nil
	}
	for label := range strings.SplitSeq(list, ",") {
		key, value, ok := strings.Cut(label, "=")
		if !ok {
			errs = append(errs, fmt.Errorf("invalid argument %q for \"--node-labels\" flag: must be formatted as key=value", label))
			continue
		}
		for _, msg := range append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...) {
			errs = append(errs, fmt.Errorf("invalid node labels: %q: %s", label, msg))
		}
		domain, _, _ := strings.Cut(key, "/")
		reserved := strings.HasSuffix("."+domain, ".kubernetes.io") || strings.HasSuffix("."+domain, ".k8s.io")
		if reserved && strings.Contains(key, "/") && !apis.IsKubeletLabel(key) {
			errs = append(errs, fmt.Errorf("unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [%s]", key))
		}
	}
	return errs
}

// decode decodes YAML or JSON into one of the types that add registers, by its apiVersion and kind. Unlike kubelet, which
// only warns, it refuses unknown and duplicate fields.
func decode[T any](path string, add func(*runtime.Scheme) error) (*T, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, err
	}
	object, kind, err := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer().Decode(b, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("failed to decode %s: %w", path, err)
	}
	into, ok := object.(any).(*T)
	if !ok {
		return nil, fmt.Errorf("failed to decode %s: unexpected kind %s", path, kind)
	}
	return into, nil
}

func loadConfig(path string) (*kubeletv1beta1.KubeletConfiguration, error) {
	if path == "" {
		return nil, errors.New("no --config")
	}
	c, err := decode[kubeletv1beta1.KubeletConfiguration](path, kubeletv1beta1.AddToScheme)
	if err != nil {
		return nil, fmt.Errorf("failed to load kubelet config file, path: %s, error: %w", path, err)
	}
	var errs []error
	if ca := c.Authentication.X509.ClientCAFile; ca != "" {
		if _, err := os.ReadFile(ca); err != nil {
			errs = append(errs, fmt.Errorf("unable to load client CA file %s: %w", ca, err))
		}
	}
	if dir := c.StaticPodPath; dir != "" {
		if _, err := os.ReadDir(dir); err != nil {
			errs = append(errs, fmt.Errorf("staticPodPath: %w", err))
		}
	}
	if c.ResolverConfig != nil && *c.ResolverConfig != "" {
		if _, err := os.ReadFile(*c.ResolverConfig); err != nil {
			errs = append(errs, fmt.Errorf("resolvConf: %w", err))
		}
	}
	return c, utilerrors.NewAggregate(errs)
}

// loadCredential reads the file that kubelet would use, and follows its current context.
func loadCredential(o options) (*clientcmdv1.Config, error) {
	path := o.Kubeconfig
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) && o.BootstrapKubeconfig != "" {
		path = o.BootstrapKubeconfig
	}
	if path == "" {
		return nil, errors.New("neither --kubeconfig nor --bootstrap-kubeconfig")
	}
	c, err := decode[clientcmdv1.Config](path, clientcmdv1.AddToScheme)
	if err != nil {
		return nil, fmt.Errorf("failed to run Kubelet: unable to load kubeconfig: %w", err)
	}
	var use *clientcmdv1.Context
	for i := range c.Contexts {
		if c.Contexts[i].Name == c.CurrentContext {
			use = &c.Contexts[i].Context
		}
	}
	if use == nil {
		return nil, fmt.Errorf("invalid configuration: %s: context %q does not exist", path, c.CurrentContext)
	}
	errs := []error{
		fmt.Errorf("invalid configuration: %s: cluster %q does not exist", path, use.Cluster),
		fmt.Errorf("invalid configuration: %s: user %q does not exist", path, use.AuthInfo),
	}
	for _, cluster := range c.Clusters {
		if cluster.Name != use.Cluster {
			continue
		}
		errs[0] = nil
		if cluster.Cluster.Server == "" {
			errs[0] = fmt.Errorf("invalid configuration: %s: no server found for cluster %q", path, use.Cluster)
		}
		if ca := cluster.Cluster.CertificateAuthority; ca != "" {
			if _, err := os.ReadFile(ca); err != nil {
				errs = append(errs, fmt.Errorf("invalid configuration: unable to read certificate-authority: %w", err))
			}
		}
	}
	for _, user := range c.AuthInfos {
		if user.Name != use.AuthInfo {
			continue
		}
		errs[1] = nil
		if e := user.AuthInfo.Exec; e != nil && (e.Command == "" || e.APIVersion == "" || e.InteractiveMode == "") {
			errs[1] = fmt.Errorf("invalid configuration: %s: exec of user %q needs command, apiVersion and interactiveMode", path, user.Name)
		}
	}
	return c, utilerrors.NewAggregate(errs)
}

func dialRuntime(endpoint string) error {
	if endpoint == "" {
		return nil
	}
	socket, ok := strings.CutPrefix(endpoint, "unix://")
	if !ok {
		return fmt.Errorf("containerRuntimeEndpoint %q: want unix://PATH", endpoint)
	}
	conn, err := net.DialTimeout("unix", socket, 2*time.Second)
	if err != nil {
		return fmt.Errorf("validate service connection: validate CRI v1 runtime API for endpoint %q: "+
			"rpc error: code = Unavailable desc = connection error: %w", endpoint, err)
	}
	return conn.Close()
}

// sysctls are the values that kubelet wants, and with protectKernelDefaults does not set itself
// (k8s.io/kubernetes/pkg/kubelet/cm, setupKernelTunables).
var sysctls = []struct {
	name string
	want int
}{
	{"kernel/keys/root_maxbytes", 25_000_000},
	{"kernel/keys/root_maxkeys", 1_000_000},
	{"kernel/panic", 10},
	{"kernel/panic_on_oops", 1},
	{"vm/overcommit_memory", 1},
	{"vm/panic_on_oom", 0},
}

func checkSysctls(dir string) error {
	var errs []error
	for _, s := range sysctls {
		b, err := os.ReadFile(filepath.Join(dir, s.name))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if actual := strings.TrimSpace(string(b)); actual != strconv.Itoa(s.want) {
			errs = append(errs, fmt.Errorf("invalid kernel flag: %v, expected value: %v, actual value: %v", s.name, s.want, actual))
		}
	}
	return utilerrors.NewAggregate(errs)
}

// serveHealthz serves until ctx ends. A port in use is only logged and tried again, as kubelet does: it may be another
// kubelet's on the same network.
func serveHealthz(ctx context.Context, k knobs, c *kubeletv1beta1.KubeletConfiguration) {
	host, port := "127.0.0.1", int32(10248)
	if c.HealthzBindAddress != "" {
		host = c.HealthzBindAddress
	}
	if c.HealthzPort != nil {
		port = *c.HealthzPort
	}
	if port == 0 {
		return
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		if s, ok := k.get("healthz-delay"); ok {
			d, err := time.ParseDuration(s)
			if err != nil {
				klog.ErrorS(err, "healthz-delay")
			}
			select {
			case <-time.After(d):
			case <-r.Context().Done():
				return
			}
		}
		if s, ok := k.get("healthz-status"); ok {
			status, err := strconv.Atoi(s)
			if err != nil {
				klog.ErrorS(err, "healthz-status")
			}
			http.Error(w, "healthz check failed", max(status, 100))
			return
		}
		fmt.Fprint(w, "ok")
	})
	server := &http.Server{Addr: net.JoinHostPort(host, strconv.Itoa(int(port))), Handler: mux}
	context.AfterFunc(ctx, func() { server.Close() })
	for {
		err := server.ListenAndServe()
		if errors.Is(err, http.ErrServerClosed) {
			return
		}
		klog.ErrorS(err, "Failed to start healthz server")
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Second):
		}
	}
}

// knobs is the folder with the files that make the stub misbehave.
type knobs string

func (k knobs) get(name string) (string, bool) {
	b, err := os.ReadFile(filepath.Join(string(k), name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		klog.ErrorS(err, "knob", "name", name)
	}
	return strings.TrimSpace(string(b)), err == nil
}
