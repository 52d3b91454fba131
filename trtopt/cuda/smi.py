"""What nvidia-smi says of a GPU: clocks, throttling, who else uses it. Times mean little without."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

_PATIENCE = 20.0  # seconds for nvidia-smi to answer
# NVML's bits of the reasons for lower clocks; idling (1) and a display's or an application's setting are no throttling.
_REASONS = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "temperature (software)",
    0x040: "temperature (hardware)",
    0x080: "power brake",
}
_SETTING = 0x002  # the application clock was set below the highest


@dataclass(frozen=True)
class Clocks:
    """One look at a GPU; MHz and percent, None where nvidia-smi doesn't say.

    Attributes:
        throttled: reasons why it runs below its highest clock; empty: none, or only idleness.
        unknown: why nothing is known; then everything else is empty.
    """

    sm: int | None = None
    sm_most: int | None = None
    utilization: int | None = None
    throttled: tuple[str, ...] = ()
    unknown: str = ""

    def __str__(self) -> str:
        if self.unknown:
            return self.unknown
        throttling = f", held back by {', '.join(self.throttled)}" if self.throttled else ""
        return f"SM clock {self.sm or '?'} of {self.sm_most or '?'} MHz{throttling}"


def clocks(ordinal: int = 0, load: Callable[[], object] | None = None) -> Clocks:
    """Ask nvidia-smi; `load` is called again and again meanwhile, as an idle GPU lowers its clocks. Never raises for
    want of nvidia-smi."""
    problem = ""
    lines: list[str] = []
    for prefix in ("clocks_throttle_reasons", "clocks_event_reasons"):  # renamed in newer drivers
        problem, lines = _ask(
            ["--query-gpu=clocks.sm,clocks.max.sm,utilization.gpu," + prefix + ".active"], ordinal, load
        )
        if not problem:
            break
    if problem or not lines or len(lines[0].split(",")) != 4:
        return Clocks(unknown=problem or "nvidia-smi gave an answer that can't be read: clocks are unknown")
    sm, most, utilization, active = (field.strip() for field in lines[0].split(","))
    bits = 0
    with contextlib.suppress(ValueError):
        bits = int(active, 16)
    reasons = tuple(text for bit, text in _REASONS.items() if bits & bit)
    if bits & _SETTING:
        reasons += ("a clock setting",)
    return Clocks(_number(sm), _number(most), _number(utilization), reasons)


def others(ordinal: int = 0) -> tuple[str, ...]:
    """Compute processes of others on this GPU: "pid name (memory)". Ask before this process uses CUDA: inside a
    container its own number there is unknown."""
    why, lines = _ask(["--query-compute-apps=pid,name,used_memory"], ordinal, None)
    if why:
        return ()
    processes = []
    for line in lines:
        pid, _, rest = line.partition(",")
        name, _, memory = rest.rpartition(",")
        if pid.strip().isdigit() and int(pid) != os.getpid():
            processes.append(f"{pid.strip()} {name.strip()} ({memory.strip()} MiB)")
    return tuple(processes)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _identity(ordinal: int) -> str:
    """nvidia-smi doesn't know CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[ordinal] if ordinal < len(names) else str(ordinal)


def _ask(query: list[str], ordinal: int, load: Callable[[], object] | None) -> tuple[str, list[str]]:
    """Why there is no answer ("": there is one), and its lines."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "nvidia-smi isn't there: clocks, throttling and other processes are unknown", []
    command = [program, *query, "--format=csv,noheader,nounits", "-i", _identity(ordinal)]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        return f"nvidia-smi can't be started ({error}): clocks are unknown", []
    try:
        until = time.monotonic() + _PATIENCE
        while load is not None and process.poll() is None and time.monotonic() < until:
            load()
        text, _ = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi didn't answer in {_PATIENCE:.0f} s: clocks are unknown", []
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        lines = text.strip().splitlines()
        return f"nvidia-smi failed ({lines[-1] if lines else process.returncode}): clocks are unknown", []
    return "", [line for line in text.splitlines() if line.strip()]
