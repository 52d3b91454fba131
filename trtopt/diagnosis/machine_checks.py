"""What is wrong with the machine itself: its variables, memory and disks."""

from __future__ import annotations

from collections.abc import Iterator

from trtopt.diagnosis.findings import Check, HostFinding, registering
from trtopt.diagnosis.host import GIB, Host

LEAST_FREE = 2 * GIB  # on disks; engines, graphs with Q/DQ and scratch files of one usual model

CHECKS: list[Check] = []
check = registering(CHECKS)

_VARIABLES: dict[str, tuple[str, str, str]] = {  # name → values, level, consequence
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": ("python", "warning", "reading and writing ONNX takes many times longer"),
    "CUDA_LAUNCH_BLOCKING": ("1", "warning", "every kernel is waited for: engines are slow, and times mean nothing"),
    "CUDA_MODULE_LOADING": ("EAGER", "warning", "TensorRT 8.6 builds take many times longer"),
    "NVIDIA_TF32_OVERRIDE": ("0", "info", "no FP32 layer uses TF32, whatever a build asks for"),
}


@check
def variables(host: Host) -> Iterator[HostFinding]:
    for name, (value, level, consequence) in _VARIABLES.items():
        if host.environment.get(name) == value:
            yield HostFinding("variable", level, f"{name} is {value}", consequence, f"unset {name}")


@check
def memory(host: Host) -> Iterator[HostFinding]:
    if host.free_memory is not None and host.free_memory < GIB:
        yield HostFinding(
            "little-memory",
            "warning",
            f"{host.free_memory / GIB:.1f} GiB of memory are free for this process",
            "exports, folding and builds may be killed without a message",
            "ps aux --sort=-rss | head",
        )


@check
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


@check
def no_extension(host: Host) -> Iterator[HostFinding]:
    if not host.extension:
        yield HostFinding(
            "no-extension",
            "info",
            "trtopt's C extension isn't built",
            "calibration counts more slowly, and threads share a GPU worse",
            "sudo apt-get install -y gcc python3-dev && pip install --force-reinstall --no-deps TRTOPT",
        )
