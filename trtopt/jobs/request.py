"""Request of a job list."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field

from trtopt.core.options import FOLDER, about, option
from trtopt.core.progress import SILENT, Reporter


@dataclass(frozen=True)
class JobsRequest:
    """The arguments of `trtopt.run_jobs`, which describes them."""

    jobs: str | os.PathLike[str] = field(metadata=about(help="The job list.", metavar="JOBS.toml"))
    _: KW_ONLY
    # A FOLDER isn't tried out before the call: `State.locked` names the option where the file can't be written.
    state: str | os.PathLike[str] | None = option(
        None, help="Holds what is done; default: JOBS.state.", metavar="FILE", writes=FOLDER
    )
    workers: int | None = option(None, help="Processes; default: one per core, as memory allows.", least=1)
    threads: int | None = option(None, help="Samples that a worker runs at a time; default: cores / workers.", least=1)
    ray: str | None = option(None, help="Run on a Ray cluster; alone: auto.", metavar="[ADDRESS|auto|local]")
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class JobsStateRequest:
    """The arguments of `trtopt.show_jobs`, which describes them."""

    state: str | os.PathLike[str] = field(metadata=about(help="A list, or its state file.", metavar="STATE"))
