"""cuBLAS 12 and cuDNN 8 for TensorRT 8.6 on a host that has newer ones: libraries of the old names that hand calls on.

    python scripts/gpu_standins.py LIBNVINFER_PLUGIN FOLDER REAL=SONAME...
    python scripts/gpu_standins.py site/tensorrt/libnvinfer_plugin.so.8 standins \
        /usr/local/cuda/lib64/libcublas.so.13=libcublas.so.12 /usr/local/cuda/lib64/libcublasLt.so.13=libcublasLt.so.12 \
        /usr/lib/x86_64-linux-gnu/libcudnn.so.9=libcudnn.so.8

TensorRT 8.6 opens both for every network with a V2 plugin and gives the plugin handles; FOLDER belongs in LD_LIBRARY_PATH. For
tests of plugins that don't use the handles: what a handle's function does may have changed between the versions. Takes gcc and
nm.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from pathlib import Path

VERSIONS = {  # soname → function that says a version's part, and the version that TensorRT 8.6 was made with
    "libcublas.so.12": ("cublasGetProperty", (12, 0, 2)),
    "libcublasLt.so.12": ("cublasLtGetProperty", (12, 0, 2)),
    "libcudnn.so.8": ("cudnnGetProperty", (8, 9, 2)),
}
ALSO = {
    "libcublasLt.so.12": ("cublasLtGetVersion", 120002),
    "libcudnn.so.8": ("cudnnGetVersion", 8902),
}
SOURCE = """#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
void* slots[{count}];
static char const* const names[] = {{{names}}};
static void absent(void) {{ fputs("a stand-in's function isn't in the newer library\\n", stderr); abort(); }}
__attribute__((constructor)) static void fill(void)
{{
    void* real = dlopen("{real}", RTLD_LAZY | RTLD_LOCAL);
    for (int at = 0; at < {count}; ++at)
    {{
        slots[at] = real ? dlsym(real, names[at]) : 0;
        if (!slots[at])
            slots[at] = (void*)absent;
    }}
}}
int {property}(int part, int* value) {{ static int const parts[] = {{{version}}}; *value = parts[part]; return 0; }}
"""
JUMP = (
    '__asm__(".globl {name}\\n.type {name},@function\\n"'
    ' "{name}: movq slots@GOTPCREL(%rip), %r11\\n movq {at}(%r11), %r11\\n jmp *%r11\\n");\n'
)


def symbols(library: Path, kind: str) -> list[str]:
    done = subprocess.run(["nm", "-D", kind, str(library)], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plugin", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pairs", nargs="+")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    asked = defaultdict(set)
    for name, _, version in (item.partition("@") for item in symbols(given.plugin, "--undefined-only")):
        asked[version.strip("@")].add(name)
    core = (
        given.plugin.parent / given.plugin.name.replace("_plugin", "")
    ).read_bytes()  # which looks functions up by name
    looked_up = {name.decode() for name in re.findall(rb"\0((?:cudnn|cublas)\w+)(?=\0)", core)}
    for real, soname in (pair.split("=") for pair in given.pairs):
        property_name, version = VERSIONS[soname]
        also = ALSO.get(soname, ("", 0))
        there = {name.partition("@")[0] for name in symbols(Path(real), "--defined-only")} | asked[soname]
        prefix = soname.partition(".")[0].removeprefix("lib")
        there |= {name for name in looked_up if re.match(rf"{prefix}(?!Lt)[A-Z]", name)}
        names = sorted(name for name in there - {property_name, also[0]} if name.startswith(("cublas", "cudnn")))
        source = SOURCE.format(
            count=len(names),
            names=", ".join(f'"{name}"' for name in names),
            real=real,
            property=property_name,
            version=", ".join(map(str, version)),
        )
        source += "".join(JUMP.format(name=name, at=8 * at) for at, name in enumerate(names))
        source += f"size_t {also[0]}(void) {{ return {also[1]}; }}\n" if also[0] else ""
        (given.folder / "standin.c").write_text(source)
        (given.folder / "standin.map").write_text(f"{soname} {{ global: *; }};\n")
        link = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{soname}", f"-Wl,--version-script={given.folder}/standin.map"]
        target = ["-o", str(given.folder / soname), str(given.folder / "standin.c"), "-ldl"]
        subprocess.run(["gcc", *link, *target], check=True)
        print(f"{soname}: {len(names)} functions of {real}")


if __name__ == "__main__":
    main()
