"""What is wrong with the GPU of a host, its driver, and the libraries that run on it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trtopt.core.files import whole
from trtopt.core.version import to_install
from trtopt.diagnosis.findings import Check, HostFinding, registering
from trtopt.diagnosis.host import Host
from trtopt.diagnosis.packages import Package, release

CHECKS: list[Check] = []
check = registering(CHECKS)

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


@check
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


@check
def driver_versions(host: Host) -> Iterator[HostFinding]:
    """After an upgrade without a reboot nvidia-smi says "Driver/library version mismatch"; CUDA may go on for a while."""
    library = next((name for name in host.libraries.get("gpu", {}) if name.startswith("libcuda.so.")), "")
    path = host.libraries.get("gpu", {}).get(library, "")
    match = re.search(r"libcuda\.so\.(\d{3,}[\d.]*)$", path)
    if match and host.kernel_driver and match[1] != host.kernel_driver and "compat" not in path:
        yield HostFinding(
            "driver-mismatch",
            "error",
            f"the kernel module is of driver {host.kernel_driver}, {path} of {match[1]}",
            "programs fail, now or when the library is loaded anew: the driver was upgraded without a reboot",
            "sudo reboot",
        )


@check
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
        if match := re.fullmatch(r"(tensorrt|tensorrt-rtx)-cu(\d+)", name):
            others = " ".join(f"{name}{part}" for part in ("", "-bindings", "-libs"))
            command = f"pip uninstall -y {match[1]} {others} && pip install '{match[1]}-cu{{most}}=={package.version}'"
            yield package, int(match[2]), "error", command
    bindings = host.package("cuda-bindings")
    if bindings:
        yield bindings, bindings.major, "error", "pip install 'cuda-bindings=={most}.*'"
    for name, file, variable in (
        ("onnxruntime-gpu", "onnxruntime/capi/build_and_package_info.py", "cuda_version"),
        ("torch", "torch/version.py", "cuda"),
    ):
        if (library := host.package(name)) and (cuda := _build_cuda(library, file, variable)):
            yield library, cuda, "warning", ""


def _build_cuda(package: Package, file: str, name: str) -> int:
    """Major version of the CUDA that a package was built with, from its own file; 0: without one."""
    try:
        text = whole(package.folder / file).decode("utf-8", "replace")
    except OSError:
        return 0
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"](\d+)", text, re.M)
    return int(match[1]) if match else 0


@check
def gpu_generation(host: Host) -> Iterator[HostFinding]:
    version = str(host.answered("tensorrt").get("version", ""))
    if version and host.gpus:
        least, most = _gpus_of(release(version))
        for gpu in host.gpus:
            if not least <= gpu.compute_capability <= most:
                extra = "trt11" if gpu.compute_capability > most else "trt8"
                yield HostFinding(
                    "gpu-not-supported",
                    "error",
                    f"{gpu.name} is sm{gpu.compute_capability}; TensorRT {version} is for "
                    f"sm{least} {'and later' if most > 200 else f'to sm{most}'}",
                    "builds fail, or kernels are missing",
                    to_install(extra),
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


@check
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


@check
def no_tensorrt(host: Host) -> Iterator[HostFinding]:
    if not any(module.startswith("tensorrt") for module in host.files):
        yield HostFinding(
            "no-tensorrt",
            "warning",
            "no TensorRT is installed",
            "models can be exported, checked and calibrated; engines can't be built",
            to_install("trt11" if host.gpus else "rtx"),
        )


@check
def cpu_runtime(host: Host) -> Iterator[HostFinding]:
    if host.gpus and "onnxruntime" in host.packages and "onnxruntime-gpu" not in host.packages:
        yield HostFinding(
            "onnxruntime-on-cpu",
            "info",
            f"{host.package('onnxruntime')} is the CPU's, and a GPU is here",
            "verify, --best and bench --against onnxruntime run the FP32 model on the CPU",
            f"pip uninstall -y onnxruntime && {to_install('ort-gpu')}",
        )


@check
def runtime_libraries(host: Host) -> Iterator[HostFinding]:
    """microsoft/onnxruntime: "Failed to load library libonnxruntime_providers_cuda.so", and on it goes on the CPU."""
    answer, module = host.answers.get("onnxruntime-cuda"), host.answered("onnxruntime")
    if host.gpus and module and answer is not None and answer.failure:
        package = host.package("onnxruntime-gpu")
        yield HostFinding(
            "onnxruntime-without-cuda",
            "warning",
            f"{package} can't load its part for GPUs: {answer.failure}",
            "sessions run on the CPU, with a line in the log",
            f"pip install 'onnxruntime-gpu[cuda,cudnn]=={package.version if package else '*'}'",
        )


@check
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
