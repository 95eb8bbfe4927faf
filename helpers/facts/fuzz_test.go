package facts

import (
	"bytes"
	"debug/elf"
	bin "encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/generator/file"
	"berth/generator/goalstate"
	"berth/helpers/kubelet"
	"berth/testdata/cputime"
)

// program makes the least of an ELF file that holds build information: the header and one segment of data, which is said to be as
// large as size (Go's debug/buildinfo; cmd/link writes the strings into the data since Go 1.18).
func program(size uint64, path, mod string) []byte {
	var b bytes.Buffer
	const headers = 64 + 56
	write := func(v any) { _ = bin.Write(&b, bin.LittleEndian, v) }
	write(elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	})
	write(elf.Prog64{
		Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_W), Off: headers, Vaddr: headers, Filesz: size, Memsz: size, Align: 16,
	})
	b.Write(make([]byte, 128-headers)) // the information is at a multiple of 16
	if path == "" {
		return b.Bytes()
	}
	b.WriteString("\xff Go buildinf:\x08\x02")
	b.Write(make([]byte, 16))
	for _, s := range []string{"go1.26.0", strings.Repeat("0", 16) + "path\t" + path + "\nmod\t" + mod + "\tv1.2.3\th1:x=\n" + strings.Repeat("0", 16)} {
		b.Write(bin.AppendUvarint(nil, uint64(len(s))))
		b.WriteString(s)
	}
	return b.Bytes()
}

// FuzzMachine reads a root file system in which each file that is looked into may hold anything.
func FuzzMachine(f *testing.F) {
	const (
		containerd = "usr/bin/containerd"
		kubeletBin = "usr/bin/kubelet"
	)
	good := program(4096, "github.com/containerd/containerd/v2/cmd/containerd", "github.com/containerd/containerd/v2")
	kubeconfig, err := os.ReadFile("../../testdata/render/full/want/machine/var/lib/kubelet/bootstrap-kubeconfig")
	if err != nil {
		f.Fatal(err)
	}
	ca, err := os.ReadFile("../../testdata/check/ca.crt")
	if err != nil {
		f.Fatal(err)
	}
	const status = "Package: containerd\nStatus: install ok installed\nVersion: 1:1.7.24~ds1-6+b4\n\n"
	f.Add(good, "/usr/bin/containerd\n", status, "PRETTY_NAME=\"Debian\"\n", kubeconfig, ca, "# Made by berth's render-config")
	f.Add(good, "/usr/bin/containerd\n", "\n\n\nPackage:containerd\nStatus: installed\nVersion:\n", "PRETTY_NAME=", []byte("{}"), []byte("-----BEGIN"), "")
	f.Add(program(1<<62, "x", "y"), "", "", "PRETTY_NAME='", []byte("clusters: [null, 1]\nusers: {}\n"), ca[:len(ca)/2], "x")
	f.Add([]byte("\x7fELF"), "", "", "", []byte("a: &a [*a]\nclusters: *a\n<<: {<<: *a}\n"), bytes.Repeat(ca, 3), "x")

	dir := f.TempDir()
	root, err := file.OpenRoot(dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { root.Close() })
	for _, folder := range []string{"usr/bin", "etc/containerd/certs.d/x", "var/lib/dpkg/info", kubelet.PKI} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			f.Fatal(err)
		}
	}
	slot := &goalstate.Slot{
		Containerd: goalstate.Containerd{Binary: "/" + containerd, Runc: "/" + containerd}, Kubelet: goalstate.Kubelet{Binary: "/" + kubeletBin},
	}
	f.Fuzz(func(t *testing.T, program []byte, list, status, osRelease string, kubeconfig, pem []byte, hosts string) {
		size := 0
		for name, content := range map[string][]byte{
			containerd: program, kubeletBin: program, "etc/os-release": []byte(osRelease), "var/lib/dpkg/status": []byte(status),
			"var/lib/dpkg/info/containerd.list": []byte(list), "var/lib/dpkg/info/kubelet.list": []byte(list),
			kubelet.Kubeconfig: kubeconfig, kubelet.PKI + "/" + kubelet.ClientCertificate: pem, "etc/containerd/certs.d/x/hosts.toml": []byte(hosts),
		} {
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o755); err != nil {
				t.Fatal(err)
			}
			size += len(content)
		}
		var m Machine
		var v Versions
		took := cputime.Of(func() {
			m, v = DiscoverMachine(root, slot), DiscoverVersions(root, "/"+containerd, "/"+kubeletBin)
		})
		if took > time.Second+time.Duration(size)*10*time.Microsecond {
			t.Errorf("%v for %d bytes", took, size)
		}
		for _, s := range []string{m.ContainerdPackage, v.OS, v.Containerd, v.Kubelet} {
			if strings.Contains(s, "\n") {
				t.Errorf("more than a line: %q", s)
			}
		}
	})
}

// endless is a file without an end: a header, and zeros.
type endless struct {
	header []byte
	end    int64 // of what was read
}

func (e *endless) ReadAt(b []byte, at int64) (int, error) {
	clear(b)
	if at < int64(len(e.header)) {
		copy(b, e.header[at:])
	}
	e.end = max(e.end, at+int64(len(b)))
	return len(b), nil
}

// TestLargeProgram: a file can be larger than what is on the disk, and than what can be read in the time of a step.
func TestLargeProgram(t *testing.T) {
	program := endless{header: program(1<<40, "", "")}
	if info := readBuildInfo(&program); info != nil {
		t.Errorf("build information: %v", info)
	}
	if program.end > programLimit || program.end < programLimit/2 {
		t.Errorf("%d bytes were read of a program; want no more than %d, and as many as kubelet has", program.end, programLimit)
	}
}
