package gpu

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
)

// Library returns an ELF shared object (64 bit, little endian) that has a name and nothing else: no code, no symbol. It
// is all that ldconfig(8) wants to see, and ld.so(8) loads it; debug/elf, which goes by sections, finds the name, too.
// ldconfig takes only what is for its own machine. The library needs libc and those named.
func Library(soname string, machine elf.Machine, needed ...string) []byte {
	strings := "\x00" + soname + "\x00"
	var entries []elf.Dyn64
	// ldconfig up to glibc 2.36 takes the need of libc for the sign of "libc6".
	for _, name := range append(needed, "libc.so.6") {
		entries = append(entries, elf.Dyn64{Tag: int64(elf.DT_NEEDED), Val: uint64(len(strings))})
		strings += name + "\x00"
	}

	const (
		phnum   = 3
		page    = 0x10000 // the largest page of AArch64
		dynamic = 64 + phnum*56
	)
	symtab := uint64(dynamic + (len(entries)+7)*16)
	hash := symtab + elf.Sym64Size
	strtab := hash + 4*4
	size := strtab + uint64(len(strings))
	entries = append(entries, []elf.Dyn64{
		{Tag: int64(elf.DT_SONAME), Val: 1},
		{Tag: int64(elf.DT_STRTAB), Val: strtab}, {Tag: int64(elf.DT_STRSZ), Val: uint64(len(strings))},
		{Tag: int64(elf.DT_SYMTAB), Val: symtab}, {Tag: int64(elf.DT_SYMENT), Val: elf.Sym64Size},
		{Tag: int64(elf.DT_HASH), Val: hash},
		{Tag: int64(elf.DT_NULL)},
	}...)
	const sections = "\x00.dynstr\x00.dynamic\x00.shstrtab\x00"
	shstrtab := size
	shoff := (shstrtab + uint64(len(sections)) + 7) &^ 7

	var b bytes.Buffer
	put := func(v any) {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			panic(fmt.Sprintf("gpu.Library: %v", err))
		}
	}
	put(elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_DYN), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: phnum, Shoff: shoff, Shentsize: 64, Shnum: 4, Shstrndx: 3,
	})
	// Writable, because ld.so up to glibc 2.34 relocates the dynamic section where it is.
	put(elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_W), Filesz: size, Memsz: size, Align: page})
	put(elf.Prog64{Type: uint32(elf.PT_DYNAMIC), Flags: uint32(elf.PF_R | elf.PF_W), Off: dynamic, Vaddr: dynamic, Paddr: dynamic,
		Filesz: uint64(len(entries) * 16), Memsz: uint64(len(entries) * 16), Align: 8})
	// Without it the stack would have to be executable, which ld.so refuses since glibc 2.41.
	put(elf.Prog64{Type: uint32(elf.PT_GNU_STACK), Flags: uint32(elf.PF_R | elf.PF_W), Align: 16})
	put(entries)
	put(elf.Sym64{})
	put([4]uint32{1, 1, 0, 0}) // one bucket, one chain, both empty
	b.WriteString(strings + sections)
	b.Write(make([]byte, shoff-uint64(b.Len())))
	put(elf.Section64{})
	put(elf.Section64{Name: 1, Type: uint32(elf.SHT_STRTAB), Flags: uint64(elf.SHF_ALLOC), Addr: strtab, Off: strtab,
		Size: uint64(len(strings)), Addralign: 1})
	put(elf.Section64{Name: 9, Type: uint32(elf.SHT_DYNAMIC), Flags: uint64(elf.SHF_ALLOC | elf.SHF_WRITE), Addr: dynamic, Off: dynamic,
		Size: uint64(len(entries) * 16), Link: 1, Addralign: 8, Entsize: 16})
	put(elf.Section64{Name: 18, Type: uint32(elf.SHT_STRTAB), Off: shstrtab, Size: uint64(len(sections)), Addralign: 1})
	return b.Bytes()
}
