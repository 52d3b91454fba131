"""Engines by their model: what `Session.for_model` opens.

A request that led to an engine before finds it again by the times of the files that it names, without reading them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from trtopt.builder.request import BuildRequest
from trtopt.core import operators
from trtopt.core.documents import Damaged
from trtopt.core.errors import EngineError, TrtoptError, UsageError
from trtopt.core.options import taking
from trtopt.core.values import chosen_builder
from trtopt.core.version import MAKER
from trtopt.cuda.device import probe
from trtopt.engine.store import GRAPH, PLAN, Entry, Store, named_store, stamps
from trtopt.runtime.gpu_engine import check_for_gpus, ordinals
from trtopt.trt import select

Opened = TypeVar("Opened")
_OF_SESSION = ("contexts", "queue", "graphs", "memory", "trust_host_code", "threads")  # options that a build hasn't
_FILES = ("model", "calib", "preprocess", "classes")  # that a request may name
# No engine depends on them.
_ASIDE = ("output", "force", "reporter", "store", "timing_cache", "save_calib", "compare", "log")
_SEVERAL = ("best", "certify", "heal", "min_agreement", "labels", "metric", "min", "save_calib", "save_cache")


def open_for_model(session: Callable[..., Opened], model: Any, options: dict[str, Any]) -> Opened:
    """Open a `session`, the class, on a model's engine; see `Session.for_model`. `options` are those of both."""
    backend, devices, device = options.get("backend", "auto"), options.pop("devices", None), options.get("device", 0)
    if on_gpu := backend != "onnxruntime":
        chosen_builder(backend)
    else:
        options.pop("backend")
    own = {name: options.pop(name) for name in _OF_SESSION if name in options}
    of_plan = functools.partial(session, device=device, devices=devices, backend=backend, **own)

    @taking(BuildRequest, writes=False)
    def for_model(request: BuildRequest) -> Opened:
        if on_gpu:  # said before the build
            check_for_gpus("an engine", "its graph")
        return opened(request, of_plan, with_graph=not on_gpu)

    return for_model(model, **{"output": PLAN, **options, "device": ordinals(device, devices)[0]})


def opened(request: BuildRequest, open_session: Callable[[Path], Opened], *, with_graph: bool = False) -> Opened:
    """Return what `open_session` makes of the plan that a request asks for: of the store, where it is built if need be;
    with the graph that TensorRT was given, if `with_graph`. Options that compare several engines are refused."""
    if request.output != PLAN or request.save_onnx is not None:
        raise UsageError("`output=` and `save_onnx=` name files; the store has its own: use trtopt.build to write them")
    for name in _SEVERAL:
        if getattr(request, name) not in (None, False):
            raise UsageError(f"`{name}=` compares engines or writes files: use trtopt.build, and open what it made")
    if request.int8 and request.min_snr is not None:
        raise UsageError("`min_snr=` beside `int8=True` is a search: use trtopt.tune, and open what it made")
    where = named_store(request.store, "local")
    if where is None:
        raise UsageError("`store='none'` leaves no place for the engine: use trtopt.build, and open what it made")
    store = Store(where)
    request = replace(request, save_onnx=GRAPH if with_graph else None)  # where it lies in the entry
    for last in (False, True):
        entry = _entry(request, store)
        try:
            entry.check(*(name for name in entry.files if name != PLAN))  # the session itself compares the plan
            return open_session(entry.plan)
        except (Damaged, TrtoptError) as error:
            problem = store.fault(entry.digest)
            if last or (not problem and entry.folder.exists()):  # it is whole, and something else is wrong
                raise error if isinstance(error, TrtoptError) else EngineError(str(error)) from error
            if problem:
                store.remove(entry.digest)
                request.reporter.warn(
                    f"the store's engine {entry.digest[:12]} is damaged and is built again: {problem}"
                )
    raise AssertionError


def _entry(request: BuildRequest, store: Store) -> Entry:
    question = _question(request)
    if question is not None and not request.force and (entry := store.known(question)):
        return entry
    from trtopt.builder.construction import stored_engine  # loads onnx, which a known engine doesn't need

    file_stamps = None if question is None else _stamps(request)  # before the files are read
    entry = stored_engine(request, store)
    if question is not None and file_stamps is not None:
        store.remember(question, file_stamps, entry)
    return entry


def _question(request: BuildRequest) -> dict[str, Any] | None:
    """The request as JSON, with what it depends on beside its files; None where it isn't all files and plain values."""
    options = {item.name: getattr(request, item.name) for item in fields(request) if item.name not in _ASIDE}
    samples = options["images"] is not None or options["data"] is not None
    if samples or not isinstance(options["model"], (str, os.PathLike)):
        return None
    for name in _FILES:
        if isinstance(options[name], (str, os.PathLike)) and Path(options[name]).exists():
            options[name] = os.path.realpath(options[name])
    options["save_onnx"] = options["save_onnx"] is not None
    options |= {"plugins": list(operators.plugins()), "operators": operators.digest(operators.registered())}
    generation, gpus = select(request.backend), probe()
    gpu = next((str(info) for info in gpus.devices if info.ordinal == request.device), None)
    try:
        return {
            "asked": json.loads(json.dumps(options, default=os.fspath)),
            "generation": [generation.family, generation.version],
            "gpu": gpu,
            "trtopt": MAKER,
        }
    except TypeError:  # a table, an array, a profile
        return None


def _stamps(request: BuildRequest) -> dict[str, tuple[int, ...]] | None:
    from trtopt.graph.io import external_files

    paths = [Path(value) for name in _FILES if isinstance(value := getattr(request, name), (str, os.PathLike))]
    try:
        weights = external_files(paths[0]).values()
    except Exception:  # the build says it better
        return None
    return stamps([*(path for path in paths if path.exists()), *weights, *operators.files()])
