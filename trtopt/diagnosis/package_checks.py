"""What is wrong with the Python of a host, its packages and their imports."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from trtopt.diagnosis.findings import Check, HostFinding, registering
from trtopt.diagnosis.host import MODULES, Host
from trtopt.diagnosis.packages import Package, release, unmet

CHECKS: list[Check] = []
check = registering(CHECKS)

# Whose requirements matter here; others' are their users' own.
_OWNERS = (
    *("trtopt", "onnx", "onnx-ir", "onnxscript", "ml-dtypes", "torch", "torchvision", "cuda-bindings"),
    *("onnxruntime", "onnxruntime-gpu", "opencv-python", "opencv-python-headless", "opencv-contrib-python"),
    *("opencv-contrib-python-headless", "tensorrt", "tensorrt-libs", "tensorrt-bindings", "tensorrt-rtx", "ray"),
    *(f"tensorrt-{kind}cu{cuda}{part}" for kind in ("", "rtx-") for cuda in (11, 12, 13)
      for part in ("", "-bindings", "-libs")),
    "polygraphy", "torch-tensorrt", "nvidia-modelopt",
)  # fmt: skip


@check
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


@check
def no_glibc(host: Host) -> Iterator[HostFinding]:
    if host.system.startswith("Linux") and not host.glibc:
        yield HostFinding(
            "no-glibc",
            "error",
            "the C library isn't glibc (Alpine Linux has musl)",
            "NVIDIA's driver libraries and the wheels of TensorRT, ONNX Runtime and PyTorch need glibc",
            "docker run -it python:3.12-slim bash",
        )


@check
def overlaid_packages(host: Host) -> Iterator[HostFinding]:
    """microsoft/onnxruntime#23833, #26996; opencv/opencv-python#370."""
    for module, names in MODULES.items():
        packages = _in_one_folder(host, names)
        if not packages:
            continue
        if module == "onnxruntime":
            on_gpu = host.gpus and any(package.name == "onnxruntime-gpu" for package in packages)
            requirement = "'onnxruntime-gpu[cuda,cudnn]'" if on_gpu else packages[0].name
            consequence = "the one that was installed last counts, and with the CPU's no GPU is used, without a word"
        elif module == "cv2":
            contrib = "-contrib" if any("contrib" in package.name for package in packages) else ""
            requirement = f"opencv{contrib}-python-headless"
            consequence = "files of two builds are mixed: imports fail, or ask for libGL.so.1 on servers"
        else:
            requirement, consequence = (
                packages[0].name,
                "files of two versions are mixed: imports fail, or operators are missing",
            )
        yield HostFinding(
            f"overlaid-{module}",
            "error",
            f"{_listed(packages)} are installed over each other, in the one folder {module}",
            consequence,
            f"pip uninstall -y {' '.join(package.name for package in packages)} && pip install {requirement}",
        )


@check
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


@check
def unmet_requirements(host: Host) -> Iterator[HostFinding]:
    from packaging.requirements import Requirement

    owners = [name for name in _OWNERS if name in host.packages]
    for name, requirements in unmet(host.packages, owners).items():
        installed_package = host.package(name)
        limits = sorted({str(item) for _, text in requirements for item in Requirement(text).specifier})
        who = ", ".join(dict.fromkeys(f"{package} wants {text}" for package, text in requirements))
        yield HostFinding(
            "unmet-requirement",
            "warning",
            f"{f'{installed_package} is' if installed_package else f'{name} is not'} installed; {who}",
            "imports fail, or calls fail later; numpy, protobuf and onnx are the usual ones",
            f"pip install {shlex.quote(name + ','.join(limits))}",
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


@check
def processes(host: Host) -> Iterator[HostFinding]:
    failed_answers = [answer for answer in host.answers.values() if not answer.started]
    if failed_answers:
        yield HostFinding(
            "no-processes",
            "error",
            f"{sys.executable or 'Python'}: {failed_answers[0].failure}",
            "neither libraries nor the GPU could be looked at, and whatever starts processes fails",
            f"ls -lL {shlex.quote(sys.executable or 'python3')}; ulimit -u",
        )


@check
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


def _cuda(name: str) -> int:
    """Of "tensorrt-cu12", 12."""
    match = re.search(r"-cu(\d+)", name)
    return int(match[1]) if match else 0
