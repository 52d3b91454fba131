"""The command that says what is wrong with a host, what comes of that, and what to type.

Native libraries, whose import may crash or hang, are imported in child processes: this file, run as a program. Nothing is
changed. Errors of the driver are numbered as in `cuda.h`; which GPUs a TensorRT is for is in its support matrices.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.core import host as limits
from trtopt.core.documents import plain
from trtopt.core.files import cache_path, whole
from trtopt.core.library_output import TELEMETRY_OFF
from trtopt.core.options import taking
from trtopt.core.version import to_install
from trtopt.diagnosis.migration import Migration, migrated, wrapped
from trtopt.diagnosis.request import DoctorRequest

if TYPE_CHECKING:
    from trtopt.cuda.device import Probe

FORMAT = "trtopt.doctor/1"
LEVELS = ("error", "warning", "info")
PATIENCE = 30.0  # seconds for a probe: a machine under load takes its time
_MODULES = {  # module that is imported in a child → packages that bring it; those of one row install over each other
    "tensorrt": (),
    "tensorrt_rtx": (),
    "tensorrt_lean": (),
    "tensorrt_lean_bindings": (),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime", "onnxruntime-openvino", "onnxruntime-directml"),
    "cv2": ("opencv-contrib-python-headless", "opencv-contrib-python", "opencv-python-headless", "opencv-python"),
    "onnx": ("onnx", "onnx-weekly"),
}
_NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
_NAMES |= dict.fromkeys(("tensorrt_lean_bindings", "tensorrt_lean"), "TensorRT lean")
_DEV, _PROC, _SYS = Path("/dev"), Path("/proc"), Path("/sys")


@dataclass(frozen=True)
class HostFinding:
    """Something that `doctor` found: what is there, what comes of it, and what to type.

    Attributes:
        code: stable name, for scripts.
        level: "error": something doesn't work; "warning": it works, but worse or by chance; "info": worth knowing.
    """

    code: str
    level: str
    fact: str
    consequence: str
    command: str


@dataclass(frozen=True)
class DoctorReport:
    """The facts and findings of `doctor`, errors first; or the `migration` of a command, and then the host wasn't looked at."""

    facts: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[HostFinding, ...] = ()
    migration: Migration | None = None

    @property
    def ok(self) -> bool:
        """Nothing is wrong: no errors, no warnings; nothing that TensorRT dropped or trtopt lacks."""
        wrong = any(finding.level != "info" for finding in self.findings)
        return not wrong and (self.migration is None or self.migration.ok)

    def to_json(self) -> dict[str, Any]:
        facts = {name.strip(): text for name, text in self.facts.items()}
        migration = None if self.migration is None else {**plain(self.migration), "ok": self.migration.ok}
        document = {"format": FORMAT, "ok": self.ok, "facts": facts, "findings": plain(self.findings)}
        return {**document, "migration": migration}

    @property
    def lines(self) -> Iterator[str]:
        """For a terminal of 80 columns; commands stay whole."""
        if self.migration is not None:
            yield from self.migration.lines
            return
        for name, text in self.facts.items():  # the environment is told once; places in it are relative to it
            line = f"{name:<15} {text.replace(f'{sys.prefix}{os.sep}', '')}"
            yield from wrapped(line, subsequent_indent=" " * (16 if len(name) < 16 else 4))
        for finding in self.findings:
            yield ""
            yield from wrapped(f"{finding.level}: {finding.fact}")
            yield from wrapped(finding.consequence, initial_indent="    ")
            yield f"    $ {finding.command}"
        yield ""
        counts = {level: sum(finding.level == level for finding in self.findings) for level in LEVELS}
        many = [f"{count} {level}{'s' * (count != 1 and level != 'info')}" for level, count in counts.items()]
        yield ", ".join(many) if self.findings else "nothing is wrong"

    def __str__(self) -> str:
        return "\n".join(self.lines)


@taking(DoctorRequest)
def doctor(request: DoctorRequest) -> DoctorReport:
    """Look for what is wrong with this host, or translate a command of trtexec (`migrate`), which isn't run.

    Native libraries are imported in other processes, and PyTorch isn't; nothing is changed.

    Raises:
        UsageError: a command of another program.
    """
    if request.migrate is not None:
        return DoctorReport(migration=migrated(request.migrate))
    host = examine()
    findings = sorted(host_findings(host), key=lambda finding: LEVELS.index(finding.level))
    return DoctorReport(host_facts(host), tuple(findings))


# The host ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A host as it was found: packages by normalized name, what child processes answered of each module of `_MODULES` that is
    there (facts, or the "failure"), and GPUs as the driver tells them."""

    packages: Mapping[str, str]
    answers: Mapping[str, Mapping[str, Any]]
    gpus: Probe

    def answered(self, module: str) -> Mapping[str, Any]:
        """An answer's values; empty where there is none."""
        return self.answers.get(module, {})


def examine() -> Host:
    packages: dict[str, str] = {}
    for item in importlib.metadata.distributions():
        if item.metadata and "Name" in item.metadata:  # a folder that a broken installation left has none
            packages.setdefault(re.sub(r"[-_.]+", "-", item.metadata["Name"]).lower(), item.version)
    modules = [name for name in _MODULES if importlib.machinery.PathFinder.find_spec(name)]
    return Host(packages, ask(modules, PATIENCE), importlib.import_module("trtopt.cuda.device").probe())


def ask(modules: Sequence[str], patience: float) -> dict[str, dict[str, Any]]:
    """Import modules at the same time, each in a child process; never raises for what one does."""
    path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])  # "" is the working directory

    def answer(module: str) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [sys.executable, __file__, path, module],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                env={TELEMETRY_OFF: "1", **os.environ},
                timeout=patience,
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"no answer within {patience:.0f} s"}
        except OSError as error:
            return {"failure": f"no process can be started ({error.strerror or error})"}
        with contextlib.suppress(ValueError, TypeError, IndexError):
            return dict(json.loads(done.stdout.splitlines()[-1]))  # native libraries print, too
        with contextlib.suppress(ValueError):
            return {"failure": f"the process ended with {signal.Signals(-done.returncode).name}"}
        last = " ".join(done.stderr.split()[-40:])
        return {"failure": f"the process ended with status {done.returncode} and no answer{last and f': {last}'}"}

    with ThreadPoolExecutor(len(_MODULES)) as pool:
        return dict(zip(modules, pool.map(answer, modules)))


def host_facts(host: Host) -> dict[str, str]:
    """Tell what there is, in a line each."""
    glibc = " ".join(part for part in platform.libc_ver() if part)
    facts = {"python": platform.python_version(), "environment": sys.prefix}
    facts["system"] = ", ".join(filter(None, (f"{platform.system()} {platform.machine()}", glibc)))
    facts["gpu"] = "; ".join(map(str, host.gpus.devices)) or f"none: {host.gpus.reason}"
    if driver := host.gpus.driver:
        module = re.search(r"\s(\d{3,}(?:\.\d+){1,2})\s", _text(_PROC / "driver" / "nvidia" / "version"))
        facts["driver"] = f"{module[1] + ', ' if module else ''}CUDA {driver[0]}.{driver[1]}"
    for module_name, name in _NAMES.items():
        if version := host.answered(module_name).get("version"):
            libraries = host.answered(module_name).get("libraries", {})
            facts |= {name: str(version)} | {f"  {file}": path for file, path in libraries.items()}
    names = ("onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "protobuf", "torch", "cuda-bindings")
    facts |= {name: host.packages[name] for name in names if name in host.packages}
    quota = f", {limits.quota():g} by the container's quota" if limits.quota() is not None else ""
    facts["cores"] = f"{limits.cores()} of {limits.visible_cores()}{quota}"
    return facts | {"cache": str(cache_path().absolute())}


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return whole(path).decode("utf-8", "replace")
    return ""


# Checks ------------------------------------------------------------------------------------------------------------------


def overlaid_packages(host: Host) -> Iterator[HostFinding]:
    """microsoft/onnxruntime#23833, #26996; opencv/opencv-python#370."""
    for module, names in _MODULES.items():
        packages = sorted(name for name in names if name in host.packages)
        if len(packages) > 1:
            keep, why = packages[0], "files of two builds are mixed: imports fail, or ask for libGL.so.1 on servers"
            if module == "onnxruntime":
                keep = "'onnxruntime-gpu[cuda,cudnn]'" if host.gpus and "onnxruntime-gpu" in packages else keep
                why = "the one that was installed last counts, and with the CPU's no GPU is used, without a word"
            elif module == "cv2":
                keep = f"opencv{'-contrib' * any('contrib' in name for name in packages)}-python-headless"
            fact = f"{' and '.join(packages)} are installed over each other, in the one folder {module}"
            command = f"pip uninstall -y {' '.join(packages)} && pip install {keep}"
            yield HostFinding(f"overlaid-{module}", "error", fact, why, command)


_AGAIN = "pip install --force-reinstall {requirement}"
_CAUSES = {  # what an import says → consequence, command
    r"lib(GL|EGL)\.so": (
        "OpenCV with windows needs libraries of a desktop, which servers and containers lack",
        "pip uninstall -y opencv-python opencv-contrib-python && pip install --force-reinstall opencv-python-headless",
    ),
    r"GLIBC\w*_[\d.]+.* not found": (
        "the wheel is for a newer system, or an older libstdc++ is found first, by LD_LIBRARY_PATH or in conda",
        "unset LD_LIBRARY_PATH",
    ),
    r"NumPy 1\.x cannot be run in|_ARRAY_API not found|numpy\.core\.multiarray|has no attribute 'bool'|dtype size changed": (
        "it was compiled for NumPy 1, and NumPy 2 is installed",
        "pip install -U {package} || pip install 'numpy<2'",
    ),
    r"": ("nothing that needs it works: libraries are missing, or of different versions", _AGAIN),
}


def failing_imports(host: Host) -> Iterator[HostFinding]:
    for module, names in _MODULES.items():
        if not (failure := host.answered(module).get("failure", "")):
            continue
        package = next((name for name in (*names, module.replace("_", "-")) if name in host.packages), "")
        requirement = f"{package}=={host.packages[package]}" if package else module
        why, command = next(cause for pattern, cause in _CAUSES.items() if re.search(pattern, failure))
        command = command.format(package=package or module, requirement=requirement)
        yield HostFinding(f"import-{module}", "error", f"`import {module}` fails: {failure}", why, command)


def library_version(host: Host) -> Iterator[HostFinding]:
    """NVIDIA/TensorRT#1596, #2041: the bindings of one TensorRT on the libraries of another."""
    for module in ("tensorrt", "tensorrt_rtx"):
        said = host.answered(module)
        version, inside = said.get("version", ""), said.get("library_version", "")
        if version and inside and release(version)[:3] != release(inside)[:3]:
            path = next(path for name, path in said["libraries"].items() if name.startswith(_RUNTIMES))
            fact = f"{module} {version} runs on {path}, which is {inside}"
            why = "engines are refused or fail: the library of another installation is found first"
            again = f"unset LD_LIBRARY_PATH; pip install --force-reinstall {module.replace('_', '-')}=={version}"
            yield HostFinding("library-version", "error", fact, why, again)


_DRIVER_ERRORS = {  # codes of cuInit → consequence, command
    100: ("the driver finds no GPU that this process may use", "nvidia-smi -L; unset CUDA_VISIBLE_DEVICES"),
    802: ("GPUs on an NVSwitch wait for the fabric manager", "sudo systemctl enable --now nvidia-fabricmanager"),
    803: ("the driver was upgraded and its kernel module is the old one", "sudo reboot"),
    804: ("CUDA's forward-compatibility libraries are in front of the driver's", "unset LD_LIBRARY_PATH"),
    999: (
        "the driver's module hangs, often since the machine slept",
        "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
    ),
}
_FIRST_DRIVER = {12: "525", 13: "580"}  # branch of the driver that runs this CUDA first, on Linux


def driver(host: Host) -> Iterator[HostFinding]:
    why = host.gpus.reason
    if host.gpus:
        return
    code = re.search(r"with error (\d+)", why)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not re.fullmatch(r"\s*(GPU-|MIG-|\d)\S*.*", visible) and (code or host.gpus.driver):
        fact, command = f"CUDA_VISIBLE_DEVICES is {visible!r}", "unset CUDA_VISIBLE_DEVICES"
        yield HostFinding("gpu-hidden", "error", fact, "every GPU is hidden from this process", command)
    elif code:
        consequence, command = _DRIVER_ERRORS.get(int(code[1]), ("no GPU can be used", "nvidia-smi"))
        yield HostFinding("driver-error", "error", why, consequence, command)
    elif _nvidia_hardware():
        command, consequence = "xdg-open https://www.nvidia.com/drivers", "it can't be used: there is no driver"
        if any(Path(place).exists() for place in ("/.dockerenv", "/run/.containerenv")):
            command = "docker run --gpus all …"
            consequence = "this container wasn't given it: building and running engines needs it"
        yield HostFinding("no-driver", "error", f"an NVIDIA GPU is plugged in, but {why}", consequence, command)


def _nvidia_hardware() -> bool:
    devices = _SYS / "bus" / "pci" / "devices"
    return (_DEV / "nvidia0").exists() or any(  # a display, which a card's sound device isn't
        _text(place / "vendor").strip() == "0x10de" and _text(place / "class").startswith("0x03")
        for place in (devices.iterdir() if devices.is_dir() else ())
    )


def cuda_versions(host: Host) -> Iterator[HostFinding]:
    """A driver runs its own CUDA and older; within a major version newer, too."""
    most = host.gpus.driver or (999, 0)
    for name, version in sorted(host.packages.items()):
        match = re.fullmatch(r"(tensorrt|tensorrt-rtx)-cu(\d+)", name)
        cuda = int(match[2]) if match else release(version)[0] if name == "cuda-bindings" else 0
        if cuda > most[0]:
            command = f"pip install '{name}=={most[0]}.*'"
            if match:
                others = " ".join(f"{name}{part}" for part in ("", "-bindings", "-libs"))
                command = f"pip uninstall -y {match[1]} {others} && pip install '{match[1]}-cu{most[0]}=={version}'"
            fact = f"{name} {version} is for CUDA {cuda}; the driver runs CUDA {most[0]}.{most[1]} at most"
            since = f"; from driver {_FIRST_DRIVER[cuda]} on it can" if cuda in _FIRST_DRIVER else ""
            why = f"it can't use the GPU ('CUDA driver version is insufficient'){since}"
            yield HostFinding("driver-too-old", "error", fact, why, command)


def gpu_generation(host: Host) -> Iterator[HostFinding]:
    from trtopt.trt.facts import GENERATIONS, LATER, extras, family_of  # with its room, which a child doesn't need

    newest, *_, oldest = extras("tensorrt")
    version = release(str(host.answered("tensorrt").get("version", "")))
    family = family_of("tensorrt", version) if version else "rtx" if "tensorrt_rtx" in host.answers else ""
    gpus = GENERATIONS[family].gpus_of(version) if family else ()
    for gpu in host.gpus.devices if family else ():
        sm, why, extra = gpu.compute_capability, "builds fail, or kernels are missing", newest
        if sm in gpus:
            continue
        if version:
            limit = f"sm{gpus[0]} {'and later' if LATER - 1 in gpus else f'to sm{gpus[-1]}'}"
            fact, extra = f"TensorRT {'.'.join(map(str, version))} is for {limit}", newest if sm > gpus[-1] else oldest
        else:
            fact = "TensorRT-RTX isn't for it; no other TensorRT is here"
            why = "engines can be built here for other GPUs, and not run"
        yield HostFinding("gpu-not-supported", "error", f"{gpu.name} is sm{sm}; {fact}", why, to_install(extra))


def missing_packages(host: Host) -> Iterator[HostFinding]:
    if host.gpus and "cuda-bindings" not in host.packages:
        fact, why = "a GPU is here, and cuda-bindings isn't installed", "trtopt can't run engines or time them"
        command = f"pip install 'cuda-bindings=={host.gpus.driver[0] if host.gpus.driver else 12}.*'"
        yield HostFinding("no-cuda-bindings", "warning", fact, why, command)
    if not any(module.startswith("tensorrt") for module in host.answers):
        from trtopt.trt.facts import extras

        why = "models can be exported, checked and calibrated; engines can't be built"
        command = to_install(extras("tensorrt")[0] if host.gpus else "rtx")
        yield HostFinding("no-tensorrt", "warning", "no TensorRT is installed", why, command)


def onnxruntime_provider(host: Host) -> Iterator[HostFinding]:
    """microsoft/onnxruntime: "Failed to load library libonnxruntime_providers_cuda.so", and on it goes on the CPU."""
    version, gpu_version = (host.packages.get(name) for name in ("onnxruntime", "onnxruntime-gpu"))
    if host.gpus and version and not gpu_version:
        fact = f"onnxruntime {version} is the CPU's, and a GPU is here"
        why = "verify, --best and bench --against onnxruntime run the FP32 model on the CPU"
        command = f"pip uninstall -y onnxruntime && {to_install('ort-gpu')}"
        yield HostFinding("onnxruntime-on-cpu", "info", fact, why, command)
    failure = host.answered("onnxruntime").get("cuda", "")
    if host.gpus and gpu_version and failure:
        fact = f"onnxruntime-gpu {gpu_version} can't load its part for GPUs: {failure}"
        command = f"pip install 'onnxruntime-gpu[cuda,cudnn]=={gpu_version}'"
        why = "sessions run on the CPU, with a line in the log"
        yield HostFinding("onnxruntime-without-cuda", "warning", fact, why, command)


def host_findings(host: Host) -> list[HostFinding]:
    checks = (
        overlaid_packages,
        failing_imports,
        library_version,
        driver,
        cuda_versions,
        gpu_generation,
        missing_packages,
        onnxruntime_provider,
    )
    return [finding for check in checks for finding in check(host)]


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (10, 16, 1, 11)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


# In a child process ------------------------------------------------------------------------------------------------------

_NATIVE = re.compile(r"/lib(nvinfer|nvonnxparser|tensorrt|cuda\.|cudart|cudnn|cublas|onnxruntime)[^/]*$")
_RUNTIMES = ("libnvinfer.so", "libtensorrt_rtx.so")


def _answer() -> None:
    """Import a module, and write what is known of it as the last line: doctor.py '["entries", "of", "sys.path"]' tensorrt"""
    path, name = sys.argv[1:]
    sys.path[:] = json.loads(path)  # as the parent sees packages, without this file's folder
    try:
        reply = _imported(name)
    except BaseException as error:
        reply = {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:600]}
    print("\n" + json.dumps(reply, default=str), flush=True)
    os._exit(0)  # libraries that crash when they are unloaded have answered


def _imported(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    maps = [line.split(maxsplit=5) for line in _text(_PROC / "self" / "maps").splitlines()]
    paths = sorted({parts[5] for parts in maps if len(parts) == 6 and _NATIVE.search(parts[5])})
    libraries, inside = {Path(path).name: path for path in paths}, ""
    runtime = next((path for name, path in libraries.items() if name.startswith(_RUNTIMES)), "")
    with contextlib.suppress(OSError, AttributeError):
        number = int(ctypes.CDLL(runtime).getInferLibVersion()) if runtime else 0
        unit = 1000 if number < 10000 else 10000  # 8601 is 8.6.1, and 101601 is 10.16.1
        inside = f"{number // unit}.{number % unit // 100}.{number % 100}" if number else ""
    version = str(getattr(module, "__version__", ""))
    cuda = _without_cuda(module) if name == "onnxruntime" else ""
    return {"version": version, "libraries": libraries, "library_version": inside, "cuda": cuda}


def _without_cuda(ort: Any) -> str:
    """Load ONNX Runtime's library for NVIDIA GPUs with those of CUDA, as a session would; return why it can't be, or ""."""
    getattr(ort, "preload_dlls", int)()
    try:
        for part in ("shared", "cuda"):
            library = Path(ort.__file__).parent / "capi" / f"libonnxruntime_providers_{part}.so"
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    _answer()
