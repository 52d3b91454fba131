"""Shards and builds on a Ray cluster. Only this module imports Ray.

The machine that runs the list reads all files and writes all results; workers get models, and the samples of their shards,
through Ray's object store, so no folder needs to be shared. Images travel encoded and are decoded on the cluster, once for
all models that take them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.calibration.observe import require_gpu_provider
from trtopt.core.errors import BackendError, TrtoptError, WorkerDied, require
from trtopt.core.files import whole, write_bytes
from trtopt.core.host import cores
from trtopt.core.library_output import Shared, variable
from trtopt.core.temporary import scratch
from trtopt.core.version import __version__, to_install
from trtopt.data import ImageBatches
from trtopt.jobs.builders import Lane
from trtopt.jobs.building import build_sent, model_files, parcel, sample_files
from trtopt.jobs.gpus import HOST_MEMORY
from trtopt.jobs.joblist import BuildJob
from trtopt.jobs.loop import Memory
from trtopt.jobs.work import OpenModel, Samples, Shard, decode, observe_shard

# Nothing is sent anywhere unless asked for; the processes that Ray starts inherit it.
_unreported = Shared(lambda: variable("RAY_USAGE_STATS_ENABLED", "0"))
_PATIENCE = 10.0  # seconds, for a cluster to answer; Ray itself tries for many minutes
_RETRIES = 2  # of a task whose worker or node is lost; Ray's own
_TYPE = "accelerator_type:"  # Ray's resource of a node's kind of GPU
_TRACE = 0.001  # of a resource that says where a task goes, and isn't used up


class Cluster:
    """An `Engine`. Each shard takes `threads` CPUs, and is placed where the memory it needs is free.

    Args:
        device: "cuda": each shard takes a GPU, too, which Ray gives to no other meanwhile; None: ONNX Runtime
            runs models on the CPU.
        address: of the cluster; "auto": $RAY_ADDRESS, else a cluster on this machine, else a new one for this run; "local":
            a new one.

    Raises:
        MissingDependency: Ray isn't installed.
        BackendError: the cluster can't be reached or started, has too few CPUs, or no GPU where one is needed.
    """

    def __init__(self, address: str, threads: int, device: str | None = None) -> None:
        with _unreported:
            self._ray: Any = require("ray", "ray", "`ray=`")
            self._own = not self._ray.is_initialized()
            if self._own:
                self._connect(address)
        self.threads = threads
        resources = self._ray.cluster_resources()
        if resources.get("CPU", 0) < threads:
            self.close()
            raise BackendError(
                f"the Ray cluster has {resources.get('CPU', 0):g} CPUs; a worker with `threads={threads}` needs as many"
            )
        gpus = int(resources.get("GPU", 0))
        if device is not None and not gpus:
            self.close()
            raise BackendError('the Ray cluster has no GPU; drop device = "cuda" from the list, or add nodes that have')
        at_once = max(1, int(resources["CPU"]) // threads)
        # As many again wait, so that no worker does.
        self.slots = 2 * (at_once if device is None else min(at_once, gpus))
        self._device = device
        self._most = min(
            (int(node["Resources"].get("memory", 0)) for node in self._ray.nodes() if node["Alive"]), default=0
        )
        self._memory = Memory(lambda: None)
        remote = self._ray.remote(num_cpus=threads, max_retries=_RETRIES)
        with_gpu = self._ray.remote(num_cpus=threads, num_gpus=0 if device is None else 1, max_retries=_RETRIES)
        self._observe, self._identity, self._decode = (
            with_gpu(_observe_remote),
            with_gpu(require_gpu_provider),
            remote(decode),
        )
        self._build = self._ray.remote(num_cpus=threads, max_retries=_RETRIES)(build_sent)
        self._has_gpus, self._there = bool(gpus), resources
        self._models: dict[Path, Any] = {}
        self._references: dict[Path, Any] = {}
        self._pending: dict[Future[Any], Any] = {}

    def _connect(self, address: str) -> None:
        options: dict[str, Any] = {} if address == "auto" else {"address": address}
        if address == "local":
            options |= {"num_cpus": cores(), "include_dashboard": False}
        asked = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
        host, _, port = asked.rpartition(":")
        try:
            if host and port.isdecimal() and "://" not in asked:
                socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
            with _own_handler():
                self._ray.init(
                    log_to_driver=False,
                    logging_level="error",
                    runtime_env={"env_vars": {"OPENCV_FOR_THREADS_NUM": "1"}},
                    **options,
                )
        except Exception as error:  # Ray's own have no common base
            raise BackendError(
                f"`ray='{address}'`: the cluster can't be reached or started ({str(error)[:300]}); give the address of "
                "ray start --head, auto or local"
            ) from error

    def identity(self) -> Mapping[str, str] | None:
        """Return what values depend on besides the versions that are here: the GPU, of one of the nodes."""
        if self._device is None:
            return None
        try:
            answer: Mapping[str, str] = self._ray.get(self._identity.remote())
        except Exception as error:
            raise self._ours(error) from None
        return answer

    def stages(self, part: Samples, passes: int) -> bool:
        return True

    def stage(self, part: Samples) -> Future[Any]:
        """A list of one reference. Done at once: what is decoded stays on the cluster, and tasks wait for it there."""
        staged: Future[Any] = Future()
        try:
            if isinstance(part, ImageBatches):
                staged.set_result([self._decode.remote(part.loaded())])
            else:
                staged.set_result([self._ray.put(decode(part))])
        except TrtoptError as error:
            staged.set_exception(error)
        return staged

    def observe(self, model: OpenModel, source: Any, first: int, count: int) -> Future[dict[str, Any]]:
        if model.folder not in self._models:
            files = {file.name: whole(file, None) for file in model.folder.iterdir()}
            self._models[model.folder] = self._ray.put(files)
        on_gpu = HOST_MEMORY if self._device else 0
        need = min(self._memory.need(model.fingerprint, model.nbytes, self.threads, on_gpu), self._most // 2)
        call = self._observe.options(memory=need) if need else self._observe
        reference = call.remote(self._models[model.folder], model, *source, first, count, self.threads, self._device)
        return self._future(reference, model.fingerprint)

    def _future(self, reference: Any, measured: str) -> Future[dict[str, Any]]:
        """A task's result; its "peak" is the memory of the next ones that are called the same."""
        result: Future[dict[str, Any]] = Future()
        self._pending[result] = reference

        def arrived(future: Future[Any]) -> None:
            self._pending.pop(result, None)
            error = future.exception()
            if error is not None:
                result.set_exception(self._ours(error))
            else:
                self._memory.measured(measured, future.result()["peak"])
                result.set_result(future.result())

        reference.future().add_done_callback(arrived)
        return result

    # Engines

    def lanes(self, jobs: Sequence[BuildJob]) -> list[Lane]:
        """As many for each resource as there are slots: nodes of one kind needn't wait for those of another.

        Raises:
            BackendError: the cluster has no such resource, or no GPU where a build needs one.
        """
        resources = dict.fromkeys(job.resource for job in jobs)
        if absent := [name for name in resources if name and not self._there.get(name)]:
            own = ("CPU", "GPU", "memory", "object_store_memory")
            there = sorted(name for name in self._there if name not in own and not name.startswith("node:"))
            raise BackendError(
                f"no node of the Ray cluster has the resource {absent[0]!r}; there is {', '.join(there) or 'none by name'}: "
                f"ray start --resources names further ones"
            )
        for job in jobs:
            if self._gpus_for(job) and not self._has_gpus:
                raise BackendError(
                    f'{job.name} is built on a GPU, and the Ray cluster has none: backend = "rtx", or add nodes'
                )

        def takes(resource: str, job: BuildJob) -> bool:
            return job.resource == resource

        return [Lane(partial(takes, name), self.build) for name in resources for _ in range(self.slots)]

    def _gpus_for(self, job: BuildJob) -> int:
        """How many GPUs a build takes: TensorRT-RTX needs none, and gets the one of a kind that the list names."""
        backend = job.request.backend
        return int(backend == "tensorrt" or job.resource.startswith(_TYPE) or (backend == "auto" and self._has_gpus))

    def build(self, job: BuildJob) -> Future[dict[str, Any]]:
        """See `building.build_sent`."""
        request, source = job.request, job.request.images or job.request.data
        model = self._sent_once(job.model, model_files)
        samples = None if source is None else self._sent_once(Path(source), sample_files)
        call = self._build.options(
            num_gpus=self._gpus_for(job), resources={job.resource: _TRACE} if job.resource else None
        )
        remote_request = replace(request, model=str(request.model))
        return self._future(call.remote(remote_request, model, samples, parcel(request)), job.name)

    def _sent_once(self, path: Path, reader: Callable[[Path], Mapping[str, bytes]]) -> Any:
        if path not in self._references:
            self._references[path] = self._ray.put(reader(path))
        return self._references[path]

    def _ours(self, error: BaseException) -> BaseException:
        """The exception that the task raised, or what became of its worker."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, RuntimeError) and "No module named" in str(cause):
            return BackendError(
                f"a Ray worker lacks what it needs ({str(cause).strip().splitlines()[-1]}): install "
                f"trtopt {__version__} on every node, then there: {to_install('ort', 'ray')}"
            )
        if isinstance(cause, BaseException):
            return cause if type(cause) is not type(error) else error
        if isinstance(error, self._ray.exceptions.RayError):
            return WorkerDied(f"Ray: {str(error).strip()[:500]}")
        return error

    def release(self, source: Any) -> None:
        source.clear()  # Ray frees it when no task holds it any more

    def finish(self) -> None:
        """Nothing: Ray ends a worker that had a GPU after its task."""

    def close(self) -> None:
        for reference in list(getattr(self, "_pending", {}).values()):
            self._ray.cancel(reference, force=True)
        if self._own:
            self._ray.shutdown()


@contextlib.contextmanager
def _own_handler() -> Iterator[None]:
    """SIGTERM stays the process's: Ray takes it, and ends with the status 15."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _observe_remote(
    files: Mapping[str, bytes],
    model: OpenModel,
    samples: Mapping[str, NDArray[Any]],
    first: int,
    count: int,
    threads: int,
    device: str | None,
) -> dict[str, Any]:
    return observe_shard(model, Shard(samples, first, count), threads, device, _graph(model.fingerprint, files))


_graphs: dict[str, ModelProto] = {}


def _graph(fingerprint: str, files: Mapping[str, bytes]) -> ModelProto:
    """The model, loaded; one is kept, for the shards that follow."""
    if fingerprint not in _graphs:
        _graphs.clear()
        with scratch() as folder:
            for name, content in files.items():
                write_bytes(folder / name, content)
            _graphs[fingerprint] = onnx.load(folder / "model.onnx")
    return _graphs[fingerprint]
