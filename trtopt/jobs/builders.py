"""Where the engines of a list are built: lanes, each of which builds one engine at a time.

A build times kernels, and two on one GPU would falsify each other's times. So a machine has a lane for each GPU, whose worker
sees no other; one without GPUs, where TensorRT-RTX builds, has a lane for each worker. On a cluster Ray hands out the GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.jobs.gpus import places
from trtopt.jobs.joblist import SAVED, BuildJob
from trtopt.jobs.pool import Pool

CALL = "trtopt.jobs.building:build_engine"


@dataclass(frozen=True)
class Lane:
    """Takes jobs of its own kind, one after another."""

    takes: Callable[[BuildJob], bool]
    build: Callable[[BuildJob], Future[dict[str, Any]]]


def local_lanes(pool: Pool, gpus: Sequence[str], threads: int, stack: ExitStack) -> list[Lane]:
    """On this machine.

    Args:
        pool: its workers build where there is no GPU.
        gpus: names of the GPUs.
        threads: of each GPU's worker.
        stack: ends the workers.
    """
    if not gpus:
        return [Lane(lambda _: True, lambda job: pool.submit(CALL, job.request)) for _ in range(pool.workers)]
    alike = len(set(gpus)) == 1

    def lane(number: int, place: dict[str, str]) -> Lane:
        own = Pool(1, threads, [place])
        stack.callback(own.close)
        return Lane(
            lambda job: job.device == number or (job.device is None and (alike or number == 0)),
            lambda job: own.submit(CALL, replace(job.request, device=0)),  # the only one that it sees
        )

    return [lane(number, place) for number, place in enumerate(places(len(gpus)))]


def check_place(jobs: Sequence[BuildJob], ray: bool) -> None:
    """Refuse what can't be done where the list is run.

    Raises:
        UsageError: a job needs Ray and there is none, or the other way round.
    """
    for job in jobs:
        if job.resource and not ray:
            raise UsageError(
                f"{job.name} is to be built on a Ray node with resource = {job.resource!r}, and without Ray it would be this "
                "machine: add `ray='auto'`, or drop resource from the list"
            )
        for name in (*SAVED, "timing_cache"):
            if ray and getattr(job.request, name) is not None:
                raise UsageError(f"{job.name}: {name} names a file of the machine that builds: drop it, or `ray=`")
        if ray and job.device is not None:
            raise UsageError(
                f"{job.name}: device is a GPU of this machine, and Ray hands them out: drop device, or `ray=`"
            )
