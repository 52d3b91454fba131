"""An engine opened on GPUs: the TensorRT that made it, the checks of its manifest, its weights on each GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtopt.core.errors import DeviceError, EngineMismatch, OutputError, UsageError
from trtopt.core.files import cache_folder, sha256_json, whole, write_bytes
from trtopt.core.operators import plugins, with_kernels
from trtopt.cuda.device import Device, DeviceInfo, probe
from trtopt.cuda.memory import Memory
from trtopt.cuda.tensors import Signature, signature
from trtopt.engine.manifest import Manifest
from trtopt.runtime.request import OpeningOptions
from trtopt.runtime.slot_pool import CLOSED
from trtopt.trt import kernels, plan_loader
from trtopt.trt.loader import Loader
from trtopt.trt.plans import LoadedEngine, host_code_refused, plan_origin, unrecorded


def ordinals(device: int, devices: str | Sequence[int] | None) -> list[int]:
    """Return the numbers of the GPUs, of `device=` and `devices=`."""
    if devices is None:
        return [device]
    if devices == "all":
        return [info.ordinal for info in probe().devices] or [0]
    numbers = not isinstance(devices, str) and all(isinstance(number, int) for number in devices)
    if not numbers or not devices or len(set(devices)) != len(devices):
        raise UsageError(f"devices is {devices!r}; 'all' or different GPU numbers are needed, such as [0, 1]")
    return [int(number) for number in devices]


def check_for_gpus(what: str, graph: str) -> None:
    """DeviceError where there is no GPU to run `what`, with what to ask for instead."""
    if not (gpus := probe()):
        raise DeviceError(
            f"running {what} needs an NVIDIA GPU: {gpus.reason}. To develop without one, ask for {graph}, on the CPU: "
            "`backend='onnxruntime'`; it is never taken by itself"
        )


def open_gpus(
    engine: Path, manifest: Manifest | None, options: OpeningOptions
) -> tuple[str, list[GpuEngine], Manifest | None, int]:
    """Return the family of TensorRT that runs the plan `engine`, it on each GPU, what is known of it, and its bytes."""
    numbers = ordinals(options.device, options.devices)
    check_for_gpus(engine.name, "the graph that build kept by `save_onnx=`")
    plan = whole(engine, None)
    loader = plan_loader(options.backend, plan_origin(plan) if manifest is None else manifest.origin)
    if manifest is not None:
        _check_plan(engine, plan, manifest, loader, options)
        if options.weights is not None:
            from trtopt.builder.refit import refitted_plan  # loads onnx, which a service doesn't need otherwise
            from trtopt.builder.request import RefitRequest

            host_code = options.trust_host_code
            request = RefitRequest(
                engine, options.weights, "", calib=options.calib, device=numbers[0], trust_host_code=host_code
            )
            full, manifest, _ = refitted_plan(plan, manifest, request)
            plan = bytes(full)
    elif not (options.trust or options.trust_host_code):
        raise unrecorded(engine.name)
    engines = []
    for number in numbers:
        device = Device(number)
        if manifest is not None:
            _check_gpu(manifest, device.info, engine)
        engines.append(GpuEngine(device, loader, plan, engine, options))
    return loader.family, engines, manifest, len(plan)


def _check_plan(engine: Path, plan: bytes, manifest: Manifest, loader: Loader, options: OpeningOptions) -> None:
    """Raise unless this TensorRT runs the plan, it is what its manifest describes, and it has weights or gets them."""
    made = f"{engine} was built by {manifest.origin}, here is {loader}"
    if manifest.origin.product != loader.product:
        raise EngineMismatch(f"{made}: build it again here, or install that one")
    if why := loader.unread(manifest.origin):
        raise EngineMismatch(f"{made}: {why}")
    if manifest.origin.carries and not options.trust_host_code:
        raise host_code_refused(engine.name)
    used = {name for item in manifest.plugins for name in item["creators"]}
    if manifest.plugins and (found := with_kernels(used)):
        capability = Device(ordinals(options.device, options.devices)[0]).info.compute_capability
        kernels.provide(found, loader.version, capability, rtx=loader.family == "rtx")
    manifest.check_plugins(engine, plugins())
    manifest.check_plan(engine, hashlib.sha256(plan).hexdigest())
    if manifest.spec.get("strip") and options.weights is None:
        raise UsageError(
            f"{engine} was built with `strip=True`, so it has no weights: give the model as `weights=`, or put them "
            f"in with trtopt refit {engine} MODEL.onnx -o FULL.engine"
        )


class GpuEngine:
    """An engine on one GPU: its weights, and what slots are made of. It `shares`: several contexts may use one profile."""

    def __init__(self, device: Device, loader: Loader, plan: bytes, path: Path, options: OpeningOptions) -> None:
        self.device, self.graphs = device, options.graphs
        self.notes: list[str] = []
        self._store, runtime_cache = self._kept(plan) if loader.family == "rtx" else (None, None)
        self.memory = Memory(device, options.limit)
        given: dict[str, Any] = {"host_code": options.trust_host_code, "capture": self.graphs > 0}
        with device.current():
            self._loaded: LoadedEngine | None = loader.load(plan, path.name, runtime_cache=runtime_cache, **given)
            self.signature: Signature = signature(self._loaded.engine)
            self.shares = not self.signature.dynamic or self._second_context()

    def _kept(self, plan: bytes) -> tuple[Path | None, bytes | None]:
        """Return where TensorRT-RTX's compiled kernels are kept, and those that are there. A service runs without them, too."""
        try:
            info = self.device.info
            key = {"plan": hashlib.sha256(plan).hexdigest(), "gpu": info.name, "cc": info.compute_capability}
            store = cache_folder("rtx") / f"{sha256_json(key)}.cache"
            return store, whole(store, None) if store.is_file() else None
        except (OSError, OutputError) as error:
            self.notes.append(f"kernels are compiled again in every process: {error}")
            return None, None

    def _second_context(self) -> bool:
        """Return True if a second context can be used: TensorRT 8.6 crashes where it can't."""
        engine = self.loaded
        with self.memory.gpu(engine.scratch_bytes) as scratch:
            contexts = [engine.context(scratch.handle, scratch.nbytes) for _ in range(2)]
            shares = engine.shares_profiles(contexts[1])
            contexts.clear()
        return shares

    @property
    def loaded(self) -> LoadedEngine:
        """The engine, until it is closed."""
        if self._loaded is None:
            raise DeviceError(CLOSED)
        return self._loaded

    def close(self) -> list[str]:
        """Let go of the engine; what went wrong with keeping its kernels."""
        with self.device.current():
            cache = self._loaded.runtime_cache() if self._loaded is not None and self._store is not None else None
            self._loaded = None
        if self._store is not None and cache:
            try:
                write_bytes(self._store, cache)
            except OutputError as error:
                return [f"kernels are compiled again in the next process: {error}"]
        return []


def _check_gpu(manifest: Manifest, info: DeviceInfo, engine: Path) -> None:
    """EngineMismatch where the engine was built for other GPUs; of some that isn't known."""
    here, built_for, build_gpu = info.compute_capability, manifest.compute_capabilities, manifest.generation.get("gpu")
    if manifest.targets:
        fits = here in built_for or manifest.generation["family"] != "rtx"
        made, then = f"is for {', '.join(f'sm{target}' for target in built_for)}", f"build it with `target='sm{here}'`"
    elif manifest.spec.get("hardware_compatibility") == "ampere_plus":
        fits, then = here >= 80, "build it here"
        made = f"was built for sm80 and later (`hardware_compatibility='ampere_plus'`, on {build_gpu})"
    else:
        fits, made = here in built_for, f"was built on {build_gpu}"
        then = "build it here, or with `hardware_compatibility='ampere_plus'`"
    if built_for and not fits:
        raise EngineMismatch(f"{engine} {made}; GPU {info.ordinal} is {info}: {then}")
