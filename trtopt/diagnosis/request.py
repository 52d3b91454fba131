"""Requests of doctor, profile, report and upgrade."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from trtopt.core import shared_options as shared
from trtopt.core.options import FILE, about, option
from trtopt.core.progress import SILENT, Reporter


@dataclass(frozen=True)
class DoctorRequest:
    """The arguments of `trtopt.doctor`, which describes them."""

    _: KW_ONLY
    migrate: str | None = option(
        None,
        help="Instead of the host: what of a command of trtexec, in quotes, TensorRT 10 and 11 don't have, and trtopt's way.",
        metavar="COMMAND",
    )


@dataclass(frozen=True)
class ProfileRequest:
    """The arguments of `trtopt.profile`, which describes them."""

    engine: str | os.PathLike[str] = field(metadata=shared.ENGINE)
    _: KW_ONLY
    batch: Sequence[int] = option(
        (), help="Samples at a time; default: what it is tuned for.", metavar="N[,N]", typed=str, least=1
    )
    iterations: int = option(50, help="Inferences; each layer's median counts.", least=1)
    warmup: int = option(10, help="Inferences before, not counted.", least=0)
    top: int = option(20, help="Layers of each batch to print; 0: all.", least=0)
    backend: str = shared.backend()
    device: int = shared.gpu()
    trust: bool = shared.trust()
    trust_host_code: bool = shared.trust_host_code()
    plugins: Sequence[str] | str = shared.plugins()
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class ReportRequest:
    """The arguments of `trtopt.report`, which describes them."""

    engine: str | os.PathLike[str] = field(metadata=shared.ENGINE)
    output: str | os.PathLike[str] = field(metadata=about(help="The page to write.", short="-o", writes=FILE))
    _: KW_ONLY
    results: Sequence[Any] = ()
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class UpgradeRequest:
    """The arguments of `trtopt.upgrade`, which describes them."""

    results: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = field(
        metadata=about(help="What certify --save wrote: the old one's first.", metavar="F.results…", typed=list[Path])
    )
    _: KW_ONLY
    fail_on: Sequence[str] = option(
        (), help="Exit status 1 for these: wrong, slower=5%, larger=5%, precision.", metavar="WHAT[,WHAT]", typed=str
    )
    output: str | os.PathLike[str] | None = shared.written(
        help="Write it as an HTML page.", metavar="F.html", short="-o"
    )
    reporter: Reporter = SILENT
