"""A GPU's clocks, load and throttling, as NVML tells them. Times mean little without."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LOADED = 0.3  # seconds of load before a look: an idle GPU lowers its clocks
# NVML's bits of the reasons for lower clocks; idling (1) and a display's setting are no throttling.
_REASONS = {
    0x002: "a clock setting",  # the application clock was set below the highest
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "temperature (software)",
    0x040: "temperature (hardware)",
    0x080: "power brake",
}


@dataclass(frozen=True)
class Clocks:
    """One look at a GPU; MHz and percent, None where NVML doesn't say.

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
    """Look at a GPU; `load` is called again and again just before. Never raises for want of NVML."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return _unknown("nvidia-ml-py isn't installed (pip install nvidia-ml-py)")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _unknown(f"NVML can't be asked ({error})")
    # CUDA_VISIBLE_DEVICES, which NVML doesn't know, is followed.
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[ordinal] if ordinal < len(visible) else str(ordinal)
    try:
        by_name = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
        device = by_name(int(name) if name.isdigit() else name)
        until = time.monotonic() + _LOADED
        while load is not None and time.monotonic() < until:
            load()
        active = _asked(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, device) or 0
        utilization = _asked(nvml, nvml.nvmlDeviceGetUtilizationRates, device)
        return Clocks(
            _asked(nvml, nvml.nvmlDeviceGetClockInfo, device, nvml.NVML_CLOCK_SM),
            _asked(nvml, nvml.nvmlDeviceGetMaxClockInfo, device, nvml.NVML_CLOCK_SM),
            None if utilization is None else utilization.gpu,
            tuple(text for bit, text in _REASONS.items() if active & bit),
        )
    except nvml.NVMLError as error:
        return _unknown(f"NVML knows no GPU {name} ({error})")
    finally:
        nvml.nvmlShutdown()


def _unknown(why: str) -> Clocks:
    return Clocks(unknown=f"{why}: clocks and throttling are unknown")


def _asked(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """An answer; None: this GPU or driver doesn't give it."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None
