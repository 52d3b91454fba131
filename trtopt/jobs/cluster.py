"""Work on a Ray cluster whose nodes see the list's files under the same paths. Only this module imports Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trtopt.core.errors import BackendError, WorkerDied, require
from trtopt.core.host import cores
from trtopt.core.library_output import Shared, variable
from trtopt.core.version import __version__, to_install

# Nothing is sent anywhere unless asked for; the processes that Ray starts inherit it.
_unreported = Shared(lambda: variable("RAY_USAGE_STATS_ENABLED", "0"))
_PATIENCE = 10.0  # seconds, for a cluster to answer; Ray itself tries for many minutes
_RETRIES = 2  # of a task whose worker or node is lost; Ray's own
_TRACE = 0.001  # of a resource that says where a task goes, and isn't used up


class Cluster:
    """The place of calls that `trtopt.jobs.workers.Workers` is on one machine; each call takes `threads` CPUs.

    Args:
        address: of the cluster; "auto": $RAY_ADDRESS, else a cluster on this machine, else a new one for this run; "local":
            a new one.
        folder: that nodes must see.

    Raises:
        MissingDependency: Ray isn't installed.
        BackendError: the cluster can't be reached or started, or has too few CPUs.
    """

    def __init__(self, address: str, threads: int, folder: Path) -> None:
        with _unreported:
            self._ray: Any = require("ray", "ray", "`ray=`")
            self._own = not self._ray.is_initialized()
            if self._own:
                self._connect(address)
        self._resources = self._ray.cluster_resources()
        has = self._resources.get("CPU", 0)
        self.slots, self.threads = int(has) // threads, threads
        if not self.slots:
            self.close()
            raise BackendError(f"the Ray cluster has {has:g} CPUs; a worker with `threads={threads}` needs as many")
        self.has_gpus = bool(self._resources.get("GPU"))
        self._folder = folder.absolute()
        self._remote = self._ray.remote(num_cpus=threads, max_retries=_RETRIES)(_called)
        self._pending: set[Any] = set()

    def check(self, resources: Collection[str], gpu: bool) -> None:
        """Raise BackendError where no node has one of these resources, or a GPU is needed and there is none."""
        if absent := [name for name in resources if name and not self._resources.get(name)]:
            own = ("CPU", "GPU", "memory", "object_store_memory")
            there = sorted(name for name in self._resources if name not in own and not name.startswith("node:"))
            raise BackendError(
                f"no node of the Ray cluster has the resource {absent[0]!r}; there is {', '.join(there) or 'none by name'}: "
                "ray start --resources names further ones"
            )
        if gpu and not self.has_gpus:
            raise BackendError(
                'the Ray cluster has no GPU: add nodes that have, or drop device or backend = "tensorrt"'
            )

    def submit(self, function: Callable[..., Any], *args: Any, gpu: bool = False, resource: str = "") -> Future[Any]:
        call = self._remote.options(num_gpus=int(gpu), resources={resource: _TRACE} if resource else None)
        reference, result = call.remote(self._folder, Path.cwd(), function, args), Future[Any]()
        self._pending.add(reference)

        def arrived(future: Future[Any]) -> None:
            self._pending.discard(reference)
            error = future.exception()
            if error is None:
                result.set_result(future.result())
            else:
                result.set_exception(self._translated(error))

        reference.future().add_done_callback(arrived)
        return result

    def _translated(self, error: BaseException) -> BaseException:
        """Return the exception that the call raised, or what became of its worker."""
        cause = getattr(error, "cause", None)
        unread = isinstance(cause or error, (RuntimeError, self._ray.exceptions.RayError))
        if unread and (lacking := re.search(r"No module named \S+", str(cause or error))):
            return BackendError(
                f"a Ray worker lacks what it needs ({lacking.group()}): install "
                f"trtopt {__version__} on every node, then there: {to_install('ort', 'ray')}"
            )
        if isinstance(cause, BaseException):
            return cause if type(cause) is not type(error) else error
        if isinstance(error, self._ray.exceptions.RayError):
            return WorkerDied(f"Ray: {str(error).strip()[:500]}")
        return error

    def _connect(self, address: str) -> None:
        options: dict[str, Any] = {} if address == "auto" else {"address": address}
        if address == "local":
            options |= {"num_cpus": cores(), "include_dashboard": False}
        asked = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
        host, _, port = asked.rpartition(":")
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if host and port.isdecimal() and "://" not in asked:
                socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
            self._ray.init(log_to_driver=False, logging_level="error", **options)
        except Exception as error:  # Ray's own have no common base
            raise BackendError(
                f"`ray='{address}'`: the cluster can't be reached or started ({str(error)[:300]}); give the address of "
                "ray start --head, auto or local"
            ) from error
        finally:  # Ray takes SIGTERM, and ends with the status 15
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)

    def close(self) -> None:
        for reference in list(getattr(self, "_pending", ())):
            self._ray.cancel(reference, force=True)
        if self._own:
            self._ray.shutdown()


def _called(folder: Path, here: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if not folder.is_dir():
        raise BackendError(
            f"the Ray node {socket.gethostname()} doesn't see {folder}: every node needs the list's folders under the same "
            "paths, such as by NFS"
        )
    with contextlib.suppress(OSError):  # it is needed where the list names its files from there
        os.chdir(here)
    return function(*args)
