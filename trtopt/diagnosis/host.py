"""What is read of a host before anything is judged."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from trtopt.core import host as limits, native
from trtopt.core.files import cache_path, whole
from trtopt.diagnosis.packages import Package, installed, module_file
from trtopt.diagnosis.probes import Answer, ask

GIB = 2**30
PATIENCE = 30.0  # seconds for what takes one; a machine under load takes its time
MODULES = {  # module that is imported in a child → packages that bring it; those of one row install over each other
    "tensorrt": (),
    "tensorrt_rtx": (),
    "tensorrt_lean": (),
    "tensorrt_lean_bindings": (),
    "onnxruntime": (
        *("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-training"),
        *("onnxruntime-rocm", "onnxruntime-migraphx", "onnxruntime-qnn", "onnxruntime-silicon", "ort-nightly"),
        "ort-nightly-gpu",
    ),
    "cv2": (
        *("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
        "opencv-python-rolling",
    ),
    "onnx": ("onnx", "onnx-weekly"),
}
_PROC, _SYS, _DEV, _ETC = Path("/proc"), Path("/sys"), Path("/dev"), Path("/etc")


@dataclass(frozen=True)
class Folder:
    """A folder that work is written to.

    Attributes:
        role: "output", "cache" or "temporary".
        free: bytes; None: the system doesn't say.
        problem: why nothing can be written there; empty: it can.
    """

    role: str
    path: Path
    free: int | None
    problem: str = ""


@dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: int
    memory: int


@dataclass(frozen=True)
class Host:
    """A host as it was found. Every check reads this and nothing else.

    Attributes:
        python: version; prefix: the environment's folder.
        system: "Linux x86_64"; glibc: version, empty where it is another C library.
        distribution: of Linux, such as "ubuntu"; container: it runs in one.
        packages: normalized name → copies, the one that Python takes first.
        answers: what child processes said: "gpu", each module of `MODULES` that is there, and "onnxruntime-cuda".
        kernel_driver: version of NVIDIA's kernel module; empty: none is loaded.
        nvidia_hardware: an NVIDIA GPU is plugged in, whether or not it can be used.
        cores: that this process may use; visible_cores: that libraries count; quota: of the container, in cores.
        free_memory: bytes; None: the system doesn't say.
        cache_bytes: what the cache holds.
        extension: trtopt's C extension is built.
        files: module → where `import` finds it, of the modules that have a package here.
    """

    python: str
    prefix: str
    system: str
    glibc: str
    distribution: str
    container: bool
    environment: Mapping[str, str]
    packages: Mapping[str, tuple[Package, ...]]
    answers: Mapping[str, Answer]
    kernel_driver: str
    nvidia_hardware: bool
    cores: int
    visible_cores: int
    quota: float | None
    free_memory: int | None
    folders: tuple[Folder, ...]
    cache_bytes: int
    extension: bool
    files: Mapping[str, Path] = field(default_factory=dict)

    def package(self, *names: str) -> Package | None:
        """The first of these that is installed."""
        return next((self.packages[name][0] for name in names if name in self.packages), None)

    def answered(self, probe: str) -> Mapping[str, object]:
        """What a probe answered; empty where it didn't, or wasn't asked."""
        answer = self.answers.get(probe)
        return {} if answer is None or answer.values is None else answer.values

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        devices: object = self.answered("gpu").get("devices")
        fields = ("name", "compute_capability", "memory")
        return tuple(Gpu(*(item[name] for name in fields)) for item in devices) if isinstance(devices, list) else ()

    @cached_property
    def driver(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver runs."""
        version: object = self.answered("gpu").get("driver")
        return (int(version[0]), int(version[1])) if isinstance(version, list) else None

    @property
    def no_gpu(self) -> str:
        """Why no GPU can be used; empty: one can."""
        answer = self.answers.get("gpu")
        return answer.failure if answer and answer.failure else str(self.answered("gpu").get("reason", ""))

    @cached_property
    def libraries(self) -> Mapping[str, Mapping[str, str]]:
        """Probe → file name → path of the native libraries that were loaded for it."""
        by_probe = {name: self.answered(name).get("libraries") for name in self.answers}
        return {name: libraries for name, libraries in by_probe.items() if isinstance(libraries, dict)}


def examine(output: Path | None = None) -> Host:
    """Look at this host. Nothing of it is changed, and nothing native runs in this process.

    Args:
        output: the folder that results would go to; default: the working directory.
    """
    packages = installed(sys.path)
    files = {name: place for name in MODULES if (place := module_file(name, sys.path)) is not None}
    probes: dict[str, tuple[str, ...]] = {"gpu": ("gpu",)} | {name: ("module", name) for name in files}
    if "onnxruntime-gpu" in packages:
        probes["onnxruntime-cuda"] = ("provider", "onnxruntime")
    answers = ask(probes, PATIENCE)
    cache = cache_path()
    return Host(
        python=platform.python_version(),
        prefix=sys.prefix,
        system=f"{platform.system()} {platform.machine()}",
        glibc=_glibc(),
        distribution=_distribution(),
        container=any(Path(place).exists() for place in ("/.dockerenv", "/run/.containerenv")),
        environment=dict(os.environ),
        packages=packages,
        answers=answers,
        kernel_driver=_kernel_driver(),
        nvidia_hardware=_nvidia_hardware(),
        cores=limits.cores(),
        visible_cores=limits.visible_cores(),
        quota=limits.quota(),
        free_memory=limits.free_memory(),
        folders=(
            _folder("output", output or Path.cwd()),
            _folder("cache", cache),
            _folder("temporary", Path(tempfile.gettempdir())),
        ),
        cache_bytes=_size(cache),
        extension=native.run is not None,
        files=files,
    )


def _glibc() -> str:
    with contextlib.suppress(OSError, ValueError):
        if hasattr(os, "confstr"):
            return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    return ""


def _distribution() -> str:
    match = re.search(r"^ID=\"?([\w.-]+)", _text(_ETC / "os-release"), re.M)
    return match[1] if match else ""


def _kernel_driver() -> str:
    """Of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …", the version."""
    first = _text(_PROC / "driver" / "nvidia" / "version").partition("\n")[0]
    match = re.search(r"\s(\d{3,}(?:\.\d+){1,2})\s", f"{first} ")
    return match[1] if match else ""


def _nvidia_hardware() -> bool:
    if (_DEV / "nvidia0").exists():
        return True
    with contextlib.suppress(OSError):
        for device in (_SYS / "bus" / "pci" / "devices").iterdir():
            display = _text(device / "class").startswith("0x03")  # not a card's sound device
            if display and _text(device / "vendor").strip() == "0x10de":
                return True
    return False


def _folder(role: str, path: Path) -> Folder:
    """Of a folder that isn't there, what the nearest one above it that is would give."""
    path = path.absolute()
    places = (place for place in (path, *path.parents) if os.path.exists(place))  # noqa: PTH110 (pathlib's may raise)
    nearest_folder = next(places, Path(path.anchor))
    free_bytes = None
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(nearest_folder).free
    try:
        if not nearest_folder.is_dir():
            return Folder(role, path, free_bytes, f"{nearest_folder} is no folder")
        with tempfile.TemporaryFile(dir=nearest_folder):
            pass
    except OSError as error:
        return Folder(role, path, free_bytes, error.strerror or str(error))
    return Folder(role, path, free_bytes)


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return whole(path).decode("utf-8", "replace")
    return ""


def facts(host: Host) -> Mapping[str, str]:
    """What there is, in a line each."""
    texts = {
        "python": host.python,
        "environment": host.prefix,
        "system": f"{host.system}{host.glibc and f', glibc {host.glibc}'}",
    }
    texts["gpu"] = "; ".join(
        f"{gpu.name} (sm{gpu.compute_capability}, {gpu.memory / GIB:.0f} GiB)" for gpu in host.gpus
    ) or f"none: {host.no_gpu or 'not asked'}"  # fmt: skip
    if host.driver:
        texts["driver"] = ", ".join(filter(None, (host.kernel_driver, f"CUDA {host.driver[0]}.{host.driver[1]}")))
    names = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
    for module, name in (names | dict.fromkeys(("tensorrt_lean_bindings", "tensorrt_lean"), "TensorRT lean")).items():
        if version := host.answered(module).get("version"):
            texts[name] = f"{version}"
            texts |= {f"  {file}": path for file, path in host.libraries.get(module, {}).items()}
    for name in ("onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "protobuf", "torch", "cuda-bindings"):
        if package := host.package(name):
            texts[name] = package.version
    limit = f", {host.quota:g} by the container's quota" if host.quota is not None else ""
    texts["cores"] = f"{host.cores} of {host.visible_cores}{limit}"
    if host.free_memory is not None:
        texts["free memory"] = f"{host.free_memory / GIB:.1f} GiB"
    for folder in host.folders:
        room = f", {folder.free / GIB:.0f} GiB free" if folder.free is not None else ""
        holds = f", holds {host.cache_bytes / 2**20:.0f} MiB" if folder.role == "cache" else ""
        texts[folder.role] = f"{folder.path}{room}{holds}"
    return texts
