"""Plugins compiled from an operator's CUDA kernel (`trtopt.operator(kernel="F.cu")`), as the TensorRT that is here wants them.

The operator's file and `plugin/v2.h` (8.6) or `plugin/v3.h` (10, 11, RTX) make one translation unit, which needs TensorRT's
headers and nvcc. The library is kept in the cache folder by the hash of all that it is made of.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trtopt.core.errors import BuildFailed, MissingDependency, UsageError
from trtopt.core.files import cache_folder, sha256_json, whole, write_bytes
from trtopt.core.operators import Operator, add_plugin
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.temporary import scratch
from trtopt.trt.compatibility import numbers

HEADERS = "TENSORRT_INCLUDE"  # variable of the environment: the folder with NvInfer.h
ADAPTERS = Path(__file__).with_name("plugin")
# DataType's numbers.
_TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bool": 4, "uint8": 5, "bfloat16": 7, "int64": 8}
_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_PLACES = (
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
    "/usr/include",
    "/usr/local/tensorrt/include",
)
_INCLUDED = (".h", ".hpp", ".cuh", ".inc")  # beside a kernel: it may include them
_MAJOR = re.compile(r"#define\s+(?:NV_TENSORRT|TRT)_MAJOR(?:_ENTERPRISE|_RTX)?\s+(\d+)")


def provide(
    given: Iterable[Operator], version: str, capability: int, reporter: Reporter = SILENT, *, rtx: bool = False
) -> None:
    """Compile the plugins of operators, and note them as the user's own are. Arguments and errors are those of `library`."""
    for item in {item.name: item for item in given if item.kernel is not None}.values():
        with reporter.phase(f"compiling {item.name}"):
            path = library(item, version, capability, rtx=rtx)
        add_plugin(path)
        reporter.note(f"the plugin of {item.name} is {path}: engines with it need it, `plugins=['{path.name}']`")


def library(operator: Operator, version: str, capability: int, *, rtx: bool = False) -> Path:
    """Return the plugin library of an operator with a kernel, compiled where it isn't kept from an earlier time.

    Args:
        version: of the TensorRT that will load it, whose headers are looked for.
        capability: compute capability of the GPU, such as 90.

    Raises:
        UsageError: its function can't be a plugin's: what is there and what is needed is said.
        MissingDependency: there is no nvcc, or there are no headers of that TensorRT.
        BuildFailed: the compiler refuses the kernel; its first messages are quoted.
    """
    assert operator.kernel is not None
    major = numbers(version)[0]
    old = major == 8 and not rtx
    program = f'#include "description.h"\n#include "{operator.kernel.name}"\n#include "{"v2" if old else "v3"}.h"\n'
    described, compiler, include = _description(operator, old), _nvcc(), _headers(major, version, rtx)
    beside = (path for path in operator.kernel.parent.iterdir() if path.suffix in _INCLUDED)
    files = (operator.kernel, *ADAPTERS.glob("*.h"), *sorted(beside))
    sources = [(path.name, hashlib.sha256(whole(path)).hexdigest()) for path in files]
    key = sha256_json({"program": program, "description": described, "sources": sources, "for": [version, capability]})
    op = operator.name.rpartition("::")[2]
    kept = cache_folder("plugins") / f"lib{op}-trt{major}-sm{capability}-{key[:16]}.so"
    if kept.is_file():
        return kept
    with scratch() as folder:
        (folder / "description.h").write_text(described)
        (folder / ".plugin.cu").write_text(program)  # a name that no kernel has
        made = folder / "plugin.so"
        command = [compiler, "-w", "-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden,-w"]
        command += [f"-arch=sm_{capability}", f"-I{ADAPTERS}", f"-I{operator.kernel.parent}", "-isystem", str(include)]
        command += [*_package_paths(Path(compiler)), str(folder / ".plugin.cu"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            faults = [line for line in lines if "error" in line.lower()] or lines
            said = "; ".join(line.strip().replace(str(folder), "") for line in faults[:5])
            raise BuildFailed(f"nvcc can't compile {operator.kernel} for {version}: {said}")
        write_bytes(kept, whole(made, None))
    return kept


def _description(operator: Operator, old: bool) -> str:
    """Return what the adapters need to know, as C++: read off the reference's signature and what was registered beside it."""
    inputs, attributes = list[str](), list[str]()
    for item in inspect.signature(operator.reference).parameters.values():
        if item.kind is item.KEYWORD_ONLY:
            attributes.append(_attribute(operator, item))
        elif item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD):
            inputs.append(item.name)
        else:
            raise UsageError(
                f"the function of {operator.name} takes {item}; a plugin's inputs and attributes are fixed"
            )
    kinds = {name: number for name, number in _TYPES.items() if not (old and name == "bfloat16")} | (
        {"int64": 3} if old else {}
    )
    types = [kinds[_NAMES[name]] for name in operator.types if _NAMES[name] in kinds]
    outputs = [kinds[name] if name else -1 for name in operator.outputs or ("",)]

    def listed(values: Sequence[object]) -> str:
        return "{" + ", ".join(map(str, values)) + "}"

    pinned = ["true" if slot in operator.fp32_inputs else "false" for slot in range(len(inputs))]
    return (
        "#include <cstdint>\n#include <vector>\n"
        f'static char const* const kNAME = "{operator.name.rpartition("::")[2]}";\n'
        f"static constexpr int32_t kINPUTS = {len(inputs)}, kOUTPUTS = {len(outputs)};\n"
        f"static constexpr int32_t kTYPES[] = {listed(types)};\n"
        f"static constexpr bool kFP32_INPUTS[] = {listed(pinned)};\n"
        f"static constexpr int32_t kOUTPUT_TYPES[] = {listed(outputs)};\n"
        "struct Attribute { char const* name; bool integer; std::vector<double> value; };\n"
        f"static std::vector<Attribute> const kATTRIBUTES{listed(attributes)};\n"
    )


def _attribute(operator: Operator, item: inspect.Parameter) -> str:
    values = list(item.default) if isinstance(item.default, (list, tuple)) else [item.default]
    if not values or not all(isinstance(value, (int, float)) for value in values):
        raise UsageError(
            f"the function of {operator.name} has the attribute {item}; a plugin's has a default, a number or a list of them"
        )
    integer = "true" if all(isinstance(value, int) for value in values) else "false"
    return f'{{"{item.name}", {integer}, {{{", ".join(repr(float(value)) for value in values)}}}}}'


def _nvcc() -> str:
    """Return the compiler: in PATH, of a CUDA folder, or of NVIDIA's package."""
    folders = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [Path("/usr/local/cuda/bin"), *(place / "bin" for place in _packages())]
    found = shutil.which("nvcc") or next((str(path / "nvcc") for path in folders if (path / "nvcc").is_file()), None)
    if found is None:
        raise MissingDependency(
            "compiling an operator's kernel needs nvcc, which is neither in PATH nor under $CUDA_HOME: pip install "
            "nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl; or give a library that was compiled elsewhere, "
            "`plugins=['LIB.so']`"
        )
    return found


def _packages() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        yield from sorted(Path(place).glob("cu[0-9]*"))


def _package_paths(compiler: Path) -> list[str]:
    """Return where NVIDIA's package has headers and libraries: its nvcc doesn't look there by itself."""
    root = compiler.resolve().parent.parent
    return [f"-I{root / 'include'}", f"-L{root / 'lib'}"] if (root / "lib" / "libcudart_static.a").is_file() else []


def _headers(major: int, version: str, rtx: bool) -> Path:
    """Return the folder with NvInfer.h of this TensorRT."""
    given = os.environ.get(HEADERS)
    for place in (given,) if given else _PLACES:
        file = Path(place, "NvInferVersion.h")
        found = _MAJOR.search(whole(file).decode(errors="replace")) if file.is_file() else None
        if found is not None and (rtx or int(found[1]) == major):
            return Path(place)
    there = f"${HEADERS} is {given}" if given else "they aren't among the system's"
    tag = ".".join(map(str, numbers(version)[:3])) if major < 11 else f"{major}.{numbers(version)[1]}"
    raise MissingDependency(
        f"compiling an operator's kernel needs the headers of TensorRT {version}, and {there}: they are the folder include of "
        f"https://github.com/NVIDIA/TensorRT at v{tag}; name it by ${HEADERS}"
    )
