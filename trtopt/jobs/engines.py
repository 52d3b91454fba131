"""Where shards are observed: processes of this machine here, a Ray cluster in `trtopt.jobs.cluster`."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from trtopt.data import ImageBatches
from trtopt.jobs.pool import Pool
from trtopt.jobs.work import OpenModel, Samples, Shard


class Engine(Protocol):
    """`slots` tasks are worth having under way at a time; `threads` samples of a shard run side by side."""

    slots: int
    threads: int

    def stages(self, part: Samples, passes: int) -> bool:
        """Whether samples that so many passes need are to be decoded apart, by `stage`."""

    def stage(self, part: Samples) -> Future[Any]:
        """Decode once what several passes use; the result is a `source` for `observe`."""

    def observe(self, model: OpenModel, source: Any, first: int, count: int) -> Future[dict[str, Any]]:
        """See `work.observe_shard`."""

    def release(self, source: Any) -> None:
        """No pass needs these samples any more."""

    def finish(self) -> None:
        """No shard comes any more: the GPUs and their memory are free for builds."""


class Local:
    """The process pool of this machine; decoded images are shared through files, which workers map.

    Args:
        gpus: a pool whose workers have a GPU each, for the passes; None: `pool` runs them on the CPU.
        device: of those workers.
    """

    def __init__(
        self, pool: Pool, threads: int, scratch: Path, gpus: Pool | None = None, device: str | None = None
    ) -> None:
        self._observers = gpus or pool
        self.slots, self.threads = self._observers.workers, threads
        self._pool, self._scratch, self._numbers, self._device = pool, scratch, itertools.count(), device

    def stages(self, part: Samples, passes: int) -> bool:
        return passes > 1 and isinstance(part, ImageBatches)  # arrays are mapped from their own files

    def stage(self, part: Samples) -> Future[Any]:
        return self._pool.submit(
            "trtopt.jobs.work:decode_to_file", part, self._scratch / f"images{next(self._numbers)}.npy"
        )

    def observe(self, model: OpenModel, source: Any, first: int, count: int) -> Future[dict[str, Any]]:
        return self._observers.submit(
            "trtopt.jobs.work:observe_shard", model, Shard(source, first, count), self.threads, self._device
        )

    def release(self, source: Any) -> None:
        if isinstance(source, Path):
            source.unlink(missing_ok=True)

    def finish(self) -> None:
        if self._observers is not self._pool:
            self._observers.close()
