"""An engine opened on GPUs: the TensorRT that made it, the checks of its manifest, its weights on each GPU."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from trtopt.core.errors import DeviceError, EngineMismatch, OutputError, UsageError
from trtopt.core.files import cache_folder, sha256_json, whole, write_bytes
from trtopt.cuda.device import Device, DeviceInfo, probe
from trtopt.cuda.memory import Memory
from trtopt.cuda.tensors import Signature, signature
from trtopt.engine.manifest import Manifest
from trtopt.runtime.slot_pool import CLOSED
from trtopt.trt import plan_loader
from trtopt.trt.loader import Loader
from trtopt.trt.plans import LoadedEngine, host_code_refused, plan_origin, unrecorded


def ordinals(devices: str | Sequence[int]) -> list[int]:
    """GPU numbers, from "all" or a list of them."""
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
    engine: Path,
    manifest: Manifest | None,
    ordinals: Sequence[int],
    backend: str,
    graphs: int,
    limit: int | None,
    trust: bool,
    trust_host_code: bool,
    weights: str | os.PathLike[str] | None = None,
    calib: str | os.PathLike[str] | None = None,
) -> tuple[str, list[GpuEngine], Manifest | None, int]:
    """Return the family of TensorRT that runs the plan `engine`, it on each GPU, what is known of it, and its bytes.

    The options are those of `Session`, which says what is raised; `weights` are for an engine with a manifest.
    """
    check_for_gpus(engine.name, "the graph that build kept by `save_onnx=`")
    plan = whole(engine, None)
    origin = plan_origin(plan) if manifest is None else manifest.origin
    generation = plan_loader(backend, origin)
    if manifest is None:
        if not trust:
            raise unrecorded(engine.name)
    else:
        made = f"{engine} was built by {manifest.origin}, here is {generation}"
        if manifest.origin.product != generation.product:
            raise EngineMismatch(f"{made}: build it again here, or install that one")
        if why := generation.unread(manifest.origin):
            raise EngineMismatch(f"{made}: {why}")
        if manifest.origin.carries and not trust_host_code:
            raise host_code_refused(engine.name)
        manifest.check_plan(engine, hashlib.sha256(plan).hexdigest())
        if weights is not None:
            from trtopt.builder.refit import refitted_plan  # loads onnx, which a service doesn't need otherwise
            from trtopt.builder.request import RefitRequest

            request = RefitRequest(
                engine, weights, "", calib=calib, device=ordinals[0], trust_host_code=trust_host_code
            )
            refitted = refitted_plan(plan, manifest, request)
            plan, manifest = bytes(refitted.plan), refitted.manifest
        elif manifest.spec.get("strip"):
            raise UsageError(
                f"{engine} was built with `strip=True`, so it has no weights: give the model as `weights=`, or put them "
                f"in with trtopt refit {engine} MODEL.onnx -o FULL.engine"
            )
    engines = []
    for ordinal in ordinals:
        device = Device(ordinal)
        if manifest is not None:
            _check_gpu(manifest, device.info, engine)
        engines.append(GpuEngine(device, generation, plan, engine, graphs, limit, trust_host_code))
    return generation.family, engines, manifest, len(plan)


class GpuEngine:
    """An engine on one GPU: its weights, and what slots are made of. The arguments are options of `Session`.

    Attributes:
        shares: several contexts may use one profile.
        notes: what the user should know.
    """

    def __init__(
        self,
        device: Device,
        generation: Loader,
        plan: bytes,
        path: Path,
        graphs: int,
        limit: int | None,
        trust_host_code: bool,
    ) -> None:
        self.device, self.graphs = device, graphs
        self.notes: list[str] = []
        self._store, runtime_cache = self._kept(plan) if generation.family == "rtx" else (None, None)
        self.memory = Memory(device, limit)
        with device.current():
            self._loaded: LoadedEngine | None = generation.load(
                plan, path.name, host_code=trust_host_code, runtime_cache=runtime_cache, capture=graphs > 0
            )
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
    here, built_for, build_gpu = info.compute_capability, manifest.built_for, manifest.generation.get("gpu")
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
