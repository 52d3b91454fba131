"""What is wrong with the machine itself: its variables, cores, memory and disks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from trtopt.diagnosis.findings import Check, HostFinding, registering
from trtopt.diagnosis.host import GIB, Host

LEAST_FREE = 2 * GIB  # on disks; engines, graphs with Q/DQ and scratch files of one usual model
LEAST_SHARED = 256 * 2**20  # Docker gives 64 MiB unless told
LARGE_CACHE = 20 * GIB

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
def threads(host: Host) -> Iterator[HostFinding]:
    setting = host.environment.get("OMP_NUM_THREADS", "").split(",")[0]
    command = f"export OMP_NUM_THREADS={host.cores}"
    if setting.isdigit() and int(setting) > host.cores:
        yield HostFinding(
            "too-many-threads",
            "warning",
            f"OMP_NUM_THREADS is {setting}, and this process may use {host.cores} core{'s' * (host.cores != 1)}",
            "threads wait for each other: calibration and exports take longer than with fewer",
            command,
        )
    elif not setting and host.quota is not None and host.visible_cores >= 2 * host.cores:
        yield HostFinding(
            "threads-over-quota",
            "warning",
            f"the container may use {host.quota:g} of the {host.visible_cores} cores that libraries see",
            "PyTorch and NumPy start a thread for each, and the container is held back for most of the time",
            command,
        )


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
