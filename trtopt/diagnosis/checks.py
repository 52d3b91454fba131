"""What is looked for on a host: each check is a function of a `Host` that gives what it finds, under `@_check`.

What goes wrong most on users' hosts is from the threads of TensorRT, ONNX Runtime, OpenCV and PyTorch; driver errors are
numbered as in CUDA's `cuda.h`, and which GPUs a TensorRT is for is in its support matrices.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtopt.core.version import to_install
from trtopt.diagnosis.host import MODULES, Host
from trtopt.diagnosis.packages import Package, unmet

GIB = 2**30
LEAST_FREE = 2 * GIB  # on disks; engines, graphs with Q/DQ and scratch files of one usual model
LEAST_SHARED = 256 * 2**20  # Docker gives 64 MiB unless told
LARGE_CACHE = 20 * GIB
LEVELS = ("error", "warning", "info")


@dataclass(frozen=True)
class HostFinding:
    """Something that `doctor` found.

    Attributes:
        code: stable name, for scripts.
        level: "error": something doesn't work; "warning": it works, but worse or by chance; "info": worth knowing.
        fact: what is there.
        consequence: what comes of it.
        command: what to type.
    """

    code: str
    level: str
    fact: str
    consequence: str
    command: str


Check = Callable[[Host], Iterator[HostFinding]]
CHECKS: list[Check] = []


def _check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def findings(host: Host) -> tuple[HostFinding, ...]:
    """What all checks find, errors first. A check that fails itself is told of, and the others go on."""
    found: list[HostFinding] = []
    for check in CHECKS:
        found += _found(check, host)
    return tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level)))


def _found(check: Check, host: Host) -> list[HostFinding]:
    try:
        return list(check(host))
    except Exception as error:  # on a host that nobody thought of
        fact = f"the check {getattr(check, '__name__', check)} failed: {type(error).__name__}: {error}"
        consequence = "what it looks for isn't known here; please report this"
        return [HostFinding("check-failed", "warning", fact, consequence, "trtopt version --json")]


# Python and packages -----------------------------------------------------------------------------------------------------

# Whose requirements matter here; others' are their users' own.
_OWNERS = (
    *("trtopt", "onnx", "onnx-ir", "onnxscript", "onnxslim", "ml-dtypes", "torch", "torchvision", "cuda-bindings"),
    *("onnxruntime", "onnxruntime-gpu", "opencv-python", "opencv-python-headless", "opencv-contrib-python"),
    *("opencv-contrib-python-headless", "tensorrt", "tensorrt-libs", "tensorrt-bindings", "tensorrt-rtx", "ray"),
    *(f"tensorrt-{kind}cu{cuda}{part}" for kind in ("", "rtx-") for cuda in (11, 12, 13)
      for part in ("", "-bindings", "-libs")),
    "polygraphy", "torch-tensorrt", "nvidia-modelopt",
)  # fmt: skip


@_check
def python_version(host: Host) -> Iterator[HostFinding]:
    version = tuple(int(part) for part in re.findall(r"\d+", host.python)[:2])
    if not (3, 10) <= version < (3, 14):
        yield HostFinding(
            "python-version",
            "error",
            f"Python {host.python}",
            "trtopt is for Python 3.10 to 3.13; TensorRT's and PyTorch's wheels may not exist for this one",
            "python3.12 -m venv .venv",
        )


@_check
def no_glibc(host: Host) -> Iterator[HostFinding]:
    if host.system.startswith("Linux") and not host.glibc:
        yield HostFinding(
            "no-glibc",
            "error",
            "the C library isn't glibc (Alpine Linux has musl)",
            "NVIDIA's driver libraries and the wheels of TensorRT, ONNX Runtime and PyTorch need glibc",
            "docker run -it python:3.12-slim bash",
        )


@_check
def overlaid_packages(host: Host) -> Iterator[HostFinding]:
    """microsoft/onnxruntime#23833, #26996; opencv/opencv-python#370."""
    for module, names in MODULES.items():
        there = _in_one_folder(host, names)
        if not there:
            continue
        if module == "onnxruntime":
            on_gpu = host.gpus and any(package.name == "onnxruntime-gpu" for package in there)
            keep = "'onnxruntime-gpu[cuda,cudnn]'" if on_gpu else there[0].name
            consequence = "the one that was installed last counts, and with the CPU's no GPU is used, without a word"
        elif module == "cv2":
            contrib = "-contrib" if any("contrib" in package.name for package in there) else ""
            keep = f"opencv{contrib}-python-headless"
            consequence = "files of two builds are mixed: imports fail, or ask for libGL.so.1 on servers"
        else:
            keep, consequence = there[0].name, "files of two versions are mixed: imports fail, or operators are missing"
        yield HostFinding(
            f"overlaid-{module}",
            "error",
            f"{_listed(there)} are installed over each other, in the one folder {module}",
            consequence,
            f"pip uninstall -y {' '.join(package.name for package in there)} && pip install {keep}",
        )


@_check
def overlaid_tensorrt(host: Host) -> Iterator[HostFinding]:
    for product in ("tensorrt", "tensorrt-rtx"):
        if there := _in_one_folder(host, [f"{product}-cu{cuda}" for cuda in (11, 12, 13)]):
            names = [f"{package.name}{part}" for package in there for part in ("", "-bindings", "-libs")]
            keep = next(
                (item for item in reversed(there) if host.driver and _cuda(item.name) <= host.driver[0]), there[0]
            )
            yield HostFinding(
                f"overlaid-{product}",
                "error",
                f"{_listed(there)} are installed over each other, in the one folder {product.replace('-', '_')}",
                "the bindings are of one CUDA and the libraries of another: imports fail, or the GPU isn't found",
                f"pip uninstall -y {' '.join(names)} && pip install {keep.name}=={keep.version}",
            )


@_check
def tensorrt_parts(host: Host) -> Iterator[HostFinding]:
    """NVIDIA/TensorRT#3945: tensorrt==10.0.1 brought the libraries of 10.1."""
    for product in ("tensorrt", "tensorrt-rtx"):
        parts = [
            packages[0]
            for name, packages in sorted(host.packages.items())
            if re.fullmatch(rf"{product}(-cu\d+)?(-libs|-bindings)?", name)
        ]
        versions = {release(package.version)[:3] for package in parts}  # 8.6.1.post1 has libraries 8.6.1
        if len(versions) > 1:
            main = host.package(product) or parts[0]
            # Those of 8.6 and 9, without a CUDA in their names, are pinned by the main one, in versions of their own.
            names = dict.fromkeys([main.name, *(part.name for part in parts if _cuda(part.name))])
            yield HostFinding(
                "tensorrt-parts",
                "error",
                f"parts of {product} have different versions: {_listed(parts)}",
                "engines are refused by a version that isn't the one shown, or the import fails",
                " ".join(["pip install --force-reinstall", *(f"{name}=={main.version}" for name in names)]),
            )


@_check
def unmet_requirements(host: Host) -> Iterator[HostFinding]:
    from packaging.requirements import Requirement

    owners = [name for name in _OWNERS if name in host.packages]
    for name, wanted in unmet(host.packages, owners).items():
        there = host.package(name)
        limits = sorted({str(item) for _, text in wanted for item in Requirement(text).specifier})
        who = ", ".join(dict.fromkeys(f"{package} wants {text}" for package, text in wanted))
        yield HostFinding(
            "unmet-requirement",
            "warning",
            f"{f'{there} is' if there else f'{name} is not'} installed; {who}",
            "imports fail, or calls fail later; numpy, protobuf and onnx are the usual ones",
            f"pip install {shlex.quote(name + ','.join(limits))}",
        )


@_check
def several_copies(host: Host) -> Iterator[HostFinding]:
    watched = {*_OWNERS, *(name for names in MODULES.values() for name in names), "numpy", "protobuf"}
    for name in sorted(watched & set(host.packages)):
        copies = host.packages[name]
        if len({package.version for package in copies}) < 2:
            continue
        first, other = copies[0], next(item for item in copies if item.version != copies[0].version)
        if first.folder != other.folder and first.folder.is_relative_to(host.prefix):
            continue  # the environment's own comes first, as it should
        if first.folder == other.folder:
            fact = f"{first} and {other} both say that they are in {first.folder}"
            command = f"pip uninstall -y {name}; pip uninstall -y {name}; pip install {name}"
            consequence = "an upgrade was broken off: files of two versions may be mixed"
        else:
            fact = f"{first} in {first.folder} hides {other} in {other.folder}"
            in_path = str(first.folder) in host.environment.get("PYTHONPATH", "").split(os.pathsep)
            command = "unset PYTHONPATH" if in_path else "export PYTHONNOUSERSITE=1"
            consequence = "another version is imported than pip shows for this environment"
        yield HostFinding("several-copies", "warning", fact, consequence, command)


@_check
def hidden_modules(host: Host) -> Iterator[HostFinding]:
    """A file or folder of the user's, such as ./onnx/, that `import` finds in place of a package."""
    for module, place in host.files.items():
        folder = place.parent if place.name == "__init__.py" else place
        names = (*MODULES[module], module.replace("_", "-"))
        owners = [package for name in names for package in host.packages.get(name, ())]
        if owners and not any(folder.parent == package.folder for package in owners):
            yield HostFinding(
                "hidden-module",
                "error",
                f"`import {module}` finds {folder}, not {owners[0]} in {owners[0].folder}",
                "names are missing from the module, or another version runs than is installed",
                f"mv {shlex.quote(str(folder))} {shlex.quote(f'{folder}.old')}",
            )


_CAUSES = (  # what an import says → consequence, command
    (
        r"lib(GL|EGL)\.so",
        "OpenCV with windows needs libraries of a desktop, which servers and containers lack",
        "pip uninstall -y opencv-python opencv-contrib-python && pip install --force-reinstall opencv-python-headless",
    ),
    (
        r"lib(glib|gthread)[\w.-]*\.so",
        "OpenCV needs GLib of the system",
        "sudo apt-get install -y libglib2.0-0",
    ),
    (
        r"GLIBC_2\.\d+.* not found",
        "the wheel is for a newer system than this one (glibc {glibc})",
        "docker run -it ubuntu:24.04 bash",
    ),
    (
        r"GLIBCXX_\S+.* not found",
        "another libstdc++ is found before the system's, by LD_LIBRARY_PATH or in conda",
        "unset LD_LIBRARY_PATH; conda install -c conda-forge libstdcxx-ng",
    ),
    (
        r"NumPy 1\.x cannot be run in|_ARRAY_API not found|numpy\.core\.multiarray|has no attribute 'bool'|dtype size changed",
        "it was compiled for NumPy 1, and NumPy 2 is installed",
        "pip install -U {package} || pip install 'numpy<2'",
    ),
    (
        r"[Dd]escriptors cannot be created directly|google\.protobuf|Detected incompatible Protobuf",
        "protobuf is older or newer than what its generated code needs",
        "pip install -U protobuf onnx",
    ),
    (
        r"lib(nvinfer|nvonnxparser|tensorrt)\S*: cannot open",
        "TensorRT's bindings are there without their libraries",
        "pip install --force-reinstall {requirement}",
    ),
    (
        r"lib(cudart|cublas|cublasLt|cudnn|cufft|curand|nvrtc|nvJitLink)\S*: cannot open",
        "libraries of CUDA are missing",
        "pip install --force-reinstall {requirement}",
    ),
    (r"undefined symbol", "libraries of different versions are mixed", "pip install --force-reinstall {requirement}"),
)  # fmt: skip


@_check
def processes(host: Host) -> Iterator[HostFinding]:
    unstarted = [answer for answer in host.answers.values() if not answer.started]
    if unstarted:
        yield HostFinding(
            "no-processes",
            "error",
            f"{sys.executable or 'Python'}: {unstarted[0].failure}",
            "neither libraries nor the GPU could be looked at, and whatever starts processes fails",
            f"ls -lL {shlex.quote(sys.executable or 'python3')}; ulimit -u",
        )


@_check
def failing_imports(host: Host) -> Iterator[HostFinding]:
    for module in MODULES:
        answer = host.answers.get(module)
        if answer is None or not answer.failure or not answer.started:
            continue
        package = host.package(*MODULES[module], module.replace("_", "-"))
        names = {
            "package": package.name if package else module,
            "requirement": f"{package.name}=={package.version}" if package else module,
            "glibc": host.glibc,
        }
        consequence, command = f"nothing that needs {module} works", "pip install --force-reinstall {requirement}"
        if answer.signal:
            consequence = f"whatever imports {module} ends without a message; libraries of different versions are usual"
        for pattern, why, what in _CAUSES:
            if re.search(pattern, answer.failure):
                consequence, command = why, what
                break
        yield HostFinding(
            f"import-{module}",
            "error",
            f"`import {module}` fails: {answer.failure}",
            consequence.format(**names),
            command.format(**names),
        )


# The GPU and its driver --------------------------------------------------------------------------------------------------

_WITHOUT = 'export LD_LIBRARY_PATH="$(printf %s "$LD_LIBRARY_PATH" | tr : \'\\n\' | grep -v {} | paste -sd:)"'
_DRIVER_ERRORS = {  # codes of cuInit → consequence, command
    34: (
        "a stub that is for linking alone is found in place of the driver's library",
        _WITHOUT.format("stubs"),
    ),
    46: ("another process has the GPU for itself", "sudo nvidia-smi -c DEFAULT"),
    100: ("the driver finds no GPU that this process may use", "nvidia-smi -L; unset CUDA_VISIBLE_DEVICES"),
    304: ("the device files of the GPU can't be opened", "sudo nvidia-modprobe -u -c=0"),
    802: ("GPUs on an NVSwitch wait for the fabric manager", "sudo systemctl enable --now nvidia-fabricmanager"),
    803: ("the driver was upgraded and its kernel module is the old one", "sudo reboot"),
    804: (
        "CUDA's forward-compatibility libraries are in front, which this GPU doesn't take",
        _WITHOUT.format("compat"),
    ),
    999: (
        "the driver's module hangs, often since the machine slept",
        "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
    ),
}
_TO_INSTALL_DRIVER = {
    "ubuntu": "sudo ubuntu-drivers install && sudo reboot",
    "debian": "sudo apt-get install -y nvidia-driver && sudo reboot",
    "fedora": "sudo dnf install -y akmod-nvidia && sudo reboot",
    "arch": "sudo pacman -S nvidia && sudo reboot",
}
_DRIVER_PAGE = "xdg-open https://www.nvidia.com/drivers"
_FIRST_DRIVER = {12: "525", 13: "580"}  # branch of the driver that runs this CUDA first, on Linux


@_check
def driver(host: Host) -> Iterator[HostFinding]:
    answer = host.answers.get("gpu")
    if host.gpus or answer is None or not answer.started:
        return
    why = host.no_gpu
    code = re.search(r"with error (\d+)", why)
    visible = host.environment.get("CUDA_VISIBLE_DEVICES")
    if answer.failure:
        yield HostFinding(
            "driver-crash", "error", f"asking the NVIDIA driver: {why}", "no GPU can be used", "sudo dmesg | grep NVRM"
        )
    elif visible is not None and not re.fullmatch(r"\s*(GPU-|MIG-|\d)\S*.*", visible) and (code or host.driver):
        yield HostFinding(
            "gpu-hidden",
            "error",
            f"CUDA_VISIBLE_DEVICES is {visible!r}",
            "every GPU is hidden from this process",
            "unset CUDA_VISIBLE_DEVICES",
        )
    elif code:
        consequence, command = _DRIVER_ERRORS.get(int(code[1]), ("no GPU can be used", "nvidia-smi"))
        yield HostFinding("driver-error", "error", why, consequence, command)
    elif host.nvidia_hardware:
        command, consequence = _to_install_driver(host), "it can't be used: there is no driver"
        if host.container:
            command = "docker run --gpus all …"
            consequence = "this container wasn't given it: building and running engines needs it"
        yield HostFinding("no-driver", "error", f"an NVIDIA GPU is plugged in, but {why}", consequence, command)


def _to_install_driver(host: Host) -> str:
    return _TO_INSTALL_DRIVER.get(host.distribution, _DRIVER_PAGE)


@_check
def driver_versions(host: Host) -> Iterator[HostFinding]:
    """After an upgrade without a reboot nvidia-smi says "Driver/library version mismatch"; CUDA may go on for a while."""
    library = next((name for name in host.libraries.get("gpu", {}) if name.startswith("libcuda.so.")), "")
    path = host.libraries.get("gpu", {}).get(library, "")
    found = re.search(r"libcuda\.so\.(\d{3,}[\d.]*)$", path)
    if found and host.kernel_driver and found[1] != host.kernel_driver and "compat" not in path:
        yield HostFinding(
            "driver-mismatch",
            "error",
            f"the kernel module is of driver {host.kernel_driver}, {path} of {found[1]}",
            "programs fail, now or when the library is loaded anew: the driver was upgraded without a reboot",
            "sudo reboot",
        )


@_check
def cuda_versions(host: Host) -> Iterator[HostFinding]:
    """A driver runs its own CUDA and older; within a major version newer, too."""
    if host.driver is None:
        return
    most = host.driver[0]
    for package, cuda, level, command in _cuda_packages(host):
        if cuda <= most:
            continue
        branch = _FIRST_DRIVER.get(cuda)
        yield HostFinding(
            "driver-too-old",
            level,
            f"{package} is for CUDA {cuda}; the driver runs CUDA {host.driver[0]}.{host.driver[1]} at most",
            "it can't use the GPU ('CUDA driver version is insufficient')"
            + (f"; from driver {branch} on it can" if branch else ""),
            command.format(most=most) or _to_install_driver(host),
        )


def _cuda_packages(host: Host) -> Iterator[tuple[Package, int, str, str]]:
    """Package, major version of the CUDA that it needs, level, and how to get one for CUDA {most}; empty: a newer driver."""
    for name in sorted(host.packages):
        package = host.packages[name][0]
        if found := re.fullmatch(r"(tensorrt|tensorrt-rtx)-cu(\d+)", name):
            others = " ".join(f"{name}{part}" for part in ("", "-bindings", "-libs"))
            command = f"pip uninstall -y {found[1]} {others} && pip install '{found[1]}-cu{{most}}=={package.version}'"
            yield package, int(found[2]), "error", command
    bindings = host.package("cuda-bindings")
    if bindings:
        yield bindings, bindings.major, "error", "pip install 'cuda-bindings=={most}.*'"
    for name, file, variable in (
        ("onnxruntime-gpu", "onnxruntime/capi/build_and_package_info.py", "cuda_version"),
        ("torch", "torch/version.py", "cuda"),
    ):
        if (built := host.package(name)) and (cuda := _build_cuda(built, file, variable)):
            yield built, cuda, "warning", ""


def _build_cuda(package: Package, file: str, name: str) -> int:
    """Major version of the CUDA that a package was built with, from its own file; 0: without one."""
    try:
        text = (package.folder / file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"](\d+)", text, re.M)
    return int(found[1]) if found else 0


@_check
def gpu_generation(host: Host) -> Iterator[HostFinding]:
    version = str(host.answered("tensorrt").get("version", ""))
    if version and host.gpus:
        least, most = _gpus_of(release(version))
        for gpu in host.gpus:
            if not least <= gpu.compute_capability <= most:
                wanted = "trt11" if gpu.compute_capability > most else "trt8"
                yield HostFinding(
                    "gpu-not-supported",
                    "error",
                    f"{gpu.name} is sm{gpu.compute_capability}; TensorRT {version} is for "
                    f"sm{least} {'and later' if most > 200 else f'to sm{most}'}",
                    "builds fail, or kernels are missing",
                    to_install(wanted),
                )
    elif host.gpus and "tensorrt_rtx" in host.files and "tensorrt" not in host.files:
        for gpu in host.gpus:
            if gpu.compute_capability not in _RTX_GPUS:
                yield HostFinding(
                    "gpu-not-supported",
                    "error",
                    f"{gpu.name} is sm{gpu.compute_capability}, which TensorRT-RTX isn't for; no other TensorRT is here",
                    "engines can be built here for other GPUs, and not run",
                    to_install("trt11"),
                )


_RTX_GPUS = (75, 80, 86, 89, 120, 121)


def _gpus_of(version: tuple[int, ...]) -> tuple[int, int]:
    """Least and most compute capability that a TensorRT runs on."""
    least = 50 if version < (10,) else 70 if version < (10, 5) else 75
    return least, 90 if version < (10, 8) else 999


@_check
def no_bindings(host: Host) -> Iterator[HostFinding]:
    if host.gpus and "cuda-bindings" not in host.packages:
        major = host.driver[0] if host.driver else 12
        yield HostFinding(
            "no-cuda-bindings",
            "warning",
            "a GPU is here, and cuda-bindings isn't installed",
            "trtopt can't run engines or time them",
            f"pip install 'cuda-bindings=={major}.*'",
        )


@_check
def no_tensorrt(host: Host) -> Iterator[HostFinding]:
    if not any(module.startswith("tensorrt") for module in host.files):
        yield HostFinding(
            "no-tensorrt",
            "warning",
            "no TensorRT is installed",
            "models can be exported, checked and calibrated; engines can't be built",
            to_install("trt11" if host.gpus else "rtx"),
        )


@_check
def cpu_runtime(host: Host) -> Iterator[HostFinding]:
    if host.gpus and "onnxruntime" in host.packages and "onnxruntime-gpu" not in host.packages:
        yield HostFinding(
            "onnxruntime-on-cpu",
            "info",
            f"{host.package('onnxruntime')} is the CPU's, and a GPU is here",
            "verify, --best and bench --against onnxruntime run the FP32 model on the CPU",
            f"pip uninstall -y onnxruntime && {to_install('ort-gpu')}",
        )


@_check
def runtime_libraries(host: Host) -> Iterator[HostFinding]:
    """microsoft/onnxruntime: "Failed to load library libonnxruntime_providers_cuda.so", and on it goes on the CPU."""
    answer, imported = host.answers.get("onnxruntime-cuda"), host.answered("onnxruntime")
    if host.gpus and imported and answer is not None and answer.failure:
        package = host.package("onnxruntime-gpu")
        yield HostFinding(
            "onnxruntime-without-cuda",
            "warning",
            f"{package} can't load its part for GPUs: {answer.failure}",
            "sessions run on the CPU, with a line in the log",
            f"pip install 'onnxruntime-gpu[cuda,cudnn]=={package.version if package else '*'}'",
        )


@_check
def foreign_libraries(host: Host) -> Iterator[HostFinding]:
    """NVIDIA/TensorRT#1596, #2041: the bindings of one TensorRT on the libraries of another."""
    for module in ("tensorrt", "tensorrt_rtx"):
        version, inside = (str(host.answered(module).get(name, "")) for name in ("version", "library_version"))
        main = next(
            (
                path
                for name, path in host.libraries.get(module, {}).items()
                if re.match(r"lib(nvinfer|tensorrt_rtx)\.so", name)
            ),
            "",
        )
        product = module.replace("_", "-")
        if version and inside and release(version)[:3] != release(inside)[:3]:
            yield HostFinding(
                "library-version",
                "error",
                f"{module} {version} runs on {main}, which is {inside}",
                "engines are refused or fail: the library of another installation is found first",
                f"unset LD_LIBRARY_PATH; pip install --force-reinstall {product}=={version}",
            )
        elif main and (libs := _wheel_libraries(host, product)) and not Path(main).is_relative_to(libs):
            yield HostFinding(
                "library-elsewhere",
                "warning",
                f"{module} runs on {main}, though its wheel brought one in {libs}",
                "an update of the wheel changes nothing, and one of the system may break it",
                "unset LD_LIBRARY_PATH",
            )
        several = [
            name for name in host.libraries.get(module, {}) if name.startswith(("libnvinfer.so", "libtensorrt_rtx.so"))
        ]
        if len(several) > 1:
            yield HostFinding(
                "two-libraries",
                "error",
                f"{module} loads {' and '.join(host.libraries[module][name] for name in several)}",
                "two TensorRT in one process: engines and plugins fail by chance",
                f"unset LD_LIBRARY_PATH; pip install --force-reinstall {product}=={version}",
            )


def _wheel_libraries(host: Host, product: str) -> Path | None:
    """The folder of a TensorRT's libraries that a wheel brought."""
    names = (f"{product}-libs", *(f"{product}-cu{cuda}-libs" for cuda in (11, 12, 13)))
    package = host.package(*names)
    folder = package.folder / f"{product.replace('-', '_')}_libs" if package else None
    return folder if folder is not None and folder.is_dir() else None


# The machine -------------------------------------------------------------------------------------------------------------

_VARIABLES: dict[str, tuple[str, str, str]] = {  # name → values, level, consequence
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": ("python", "warning", "reading and writing ONNX takes many times longer"),
    "CUDA_LAUNCH_BLOCKING": ("1", "warning", "every kernel is waited for: engines are slow, and times mean nothing"),
    "CUDA_MODULE_LOADING": ("EAGER", "warning", "TensorRT 8.6 builds take many times longer"),
    "NVIDIA_TF32_OVERRIDE": ("0", "info", "no FP32 layer uses TF32, whatever a build asks for"),
}


@_check
def variables(host: Host) -> Iterator[HostFinding]:
    for name, (value, level, consequence) in _VARIABLES.items():
        if host.environment.get(name) == value:
            yield HostFinding("variable", level, f"{name} is {value}", consequence, f"unset {name}")


@_check
def threads(host: Host) -> Iterator[HostFinding]:
    asked = host.environment.get("OMP_NUM_THREADS", "").split(",")[0]
    command = f"export OMP_NUM_THREADS={host.cores}"
    if asked.isdigit() and int(asked) > host.cores:
        yield HostFinding(
            "too-many-threads",
            "warning",
            f"OMP_NUM_THREADS is {asked}, and this process may use {_cores(host.cores)}",
            "threads wait for each other: calibration and exports take longer than with fewer",
            command,
        )
    elif not asked and host.quota is not None and host.visible_cores >= 2 * host.cores:
        yield HostFinding(
            "threads-over-quota",
            "warning",
            f"the container may use {host.quota:g} of the {host.visible_cores} cores that libraries see",
            "PyTorch and NumPy start a thread for each, and the container is held back for most of the time",
            command,
        )


@_check
def memory(host: Host) -> Iterator[HostFinding]:
    if host.free_memory is not None and host.free_memory < GIB:
        yield HostFinding(
            "little-memory",
            "warning",
            f"{host.free_memory / GIB:.1f} GiB of memory are free for this process",
            "exports, folding and builds may be killed without a message",
            "ps aux --sort=-rss | head",
        )


@_check
def shared_memory(host: Host) -> Iterator[HostFinding]:
    users = [name for name in ("ray", "torch") if name in host.packages]
    if users and host.shared_memory is not None and host.shared_memory < LEAST_SHARED:
        size = "remount,size=2G" if host.shared_memory else "size=2G -t tmpfs tmpfs"
        yield HostFinding(
            "small-shared-memory",
            "warning" if "ray" in users else "info",  # trtopt itself starts no data loaders of PyTorch
            f"/dev/shm holds {host.shared_memory / 2**20:.0f} MiB" if host.shared_memory else "there is no /dev/shm",
            f"{' and '.join(users)} {'pass' if len(users) > 1 else 'passes'} arrays between processes there: 'Bus error', or "
            "slower through files",
            "docker run --shm-size=2g …" if host.container else f"sudo mount -o {size} /dev/shm",
        )


@_check
def disks(host: Host) -> Iterator[HostFinding]:
    elsewhere = {
        "output": "cd FOLDER_WITH_ROOM",
        "cache": "export TRTOPT_CACHE=FOLDER_WITH_ROOM",
        "temporary": "export TMPDIR=FOLDER_WITH_ROOM",
    }
    for folder in host.folders:
        command = elsewhere[folder.role]
        if folder.problem:
            yield HostFinding(
                f"{folder.role}-not-writable",
                "error",
                f"the {folder.role} folder {folder.path} can't be written to: {folder.problem}",
                "commands fail when they write there",
                command,
            )
        elif folder.free is not None and folder.free < LEAST_FREE:
            yield HostFinding(
                f"{folder.role}-disk-full",
                "warning",
                f"{folder.free / GIB:.1f} GiB are free where the {folder.role} folder {folder.path} is",
                "engines, graphs and scratch files may not fit: work fails at its end",
                command,
            )


@_check
def large_cache(host: Host) -> Iterator[HostFinding]:
    if host.cache_bytes > LARGE_CACHE:
        path = next(folder.path for folder in host.folders if folder.role == "cache")
        yield HostFinding(
            "large-cache",
            "info",
            f"the cache {path} holds {host.cache_bytes / GIB:.0f} GiB",
            "it saves passes over calibration data; without it they are made again",
            f"rm -r {shlex.quote(str(path))}",
        )


@_check
def no_extension(host: Host) -> Iterator[HostFinding]:
    if not host.extension:
        yield HostFinding(
            "no-extension",
            "info",
            "trtopt's C extension isn't built",
            "calibration counts more slowly, and threads share a GPU worse",
            "sudo apt-get install -y gcc python3-dev && pip install --force-reinstall --no-deps TRTOPT",
        )


# Words -------------------------------------------------------------------------------------------------------------------


def _in_one_folder(host: Host, names: Iterable[str]) -> list[Package]:
    """Those of these packages that share a folder of sys.path with another one; the first such folder's."""
    folders: dict[Path, list[Package]] = {}
    for name in names:
        for package in host.packages.get(name, ()):
            folders.setdefault(package.folder, []).append(package)
    return next((packages for packages in folders.values() if len({item.name for item in packages}) > 1), [])


def _listed(packages: list[Package]) -> str:
    *most, last = map(str, packages)
    return f"{', '.join(most)} and {last}" if most else last


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (10, 16, 1, 11)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


def _cuda(name: str) -> int:
    """Of "tensorrt-cu12", 12."""
    found = re.search(r"-cu(\d+)", name)
    return int(found[1]) if found else 0


def facts(host: Host) -> Mapping[str, str]:
    """What there is, in a line each."""
    told = {
        "python": host.python,
        "environment": host.prefix,
        "system": f"{host.system}{host.glibc and f', glibc {host.glibc}'}",
    }
    told["gpu"] = "; ".join(
        f"{gpu.name} (sm{gpu.compute_capability}, {gpu.memory / GIB:.0f} GiB)" for gpu in host.gpus
    ) or f"none: {host.no_gpu or 'not asked'}"  # fmt: skip
    if host.driver:
        told["driver"] = ", ".join(filter(None, (host.kernel_driver, f"CUDA {host.driver[0]}.{host.driver[1]}")))
    names = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
    for module, name in (names | dict.fromkeys(("tensorrt_lean_bindings", "tensorrt_lean"), "TensorRT lean")).items():
        if version := host.answered(module).get("version"):
            told[name] = f"{version}"
            told |= {f"  {file}": path for file, path in host.libraries.get(module, {}).items()}
    for name in ("onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "protobuf", "torch", "cuda-bindings"):
        if package := host.package(name):
            told[name] = package.version
    limit = f", {host.quota:g} by the container's quota" if host.quota is not None else ""
    told["cores"] = f"{host.cores} of {host.visible_cores}{limit}"
    for what, size in (("free memory", host.free_memory), ("/dev/shm", host.shared_memory)):
        if size is not None:
            told[what] = f"{size / GIB:.1f} GiB"
    for folder in host.folders:
        room = f", {folder.free / GIB:.0f} GiB free" if folder.free is not None else ""
        holds = f", holds {host.cache_bytes / 2**20:.0f} MiB" if folder.role == "cache" else ""
        told[folder.role] = f"{folder.path}{room}{holds}"
    return told
