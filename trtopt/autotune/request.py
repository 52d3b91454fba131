"""Requests of `tune`, `sensitivity` and `tiers`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from trtopt.builder.request import BuildRequest
from trtopt.core import shared_options as shared
from trtopt.core.options import FOLDER, about, option
from trtopt.core.progress import SILENT, Reporter

if TYPE_CHECKING:
    from onnx import ModelProto

    from trtopt.calibration.table import Table
    from trtopt.core.values import GivenProfile


@dataclass(frozen=True)
class TuneRequest(BuildRequest):
    """The arguments of `trtopt.tune`: those of a build in INT8."""

    int8: bool = field(default=True, kw_only=True)
    fp8: bool = field(default=False, kw_only=True)
    fp16: bool = field(default=False, kw_only=True)
    best: bool = field(default=False, kw_only=True)
    calibrator: str = field(default="trtopt", kw_only=True)
    save_cache: Any = field(default=None, kw_only=True)


@dataclass(frozen=True)
class SensitivityRequest:
    """The arguments of `trtopt.sensitivity`, which describes them."""

    model: str | os.PathLike[str] | ModelProto = field(metadata=shared.MODEL)
    _: KW_ONLY
    images: Any = shared.images()
    data: Any = shared.data()
    calib: str | os.PathLike[str] | Table | None = shared.table(help="Scales; default: measured on all the data.")
    preprocess: Any = shared.preprocess()
    limit: int | None = shared.limit()
    method: str = shared.method()
    allow_unusual_data: bool = shared.allow_unusual_data()
    samples: int = option(16, help="Samples that noise is measured on.", least=1)
    precision_override: Sequence[str] = shared.precision_override()
    threads: int | None = shared.threads()
    top: int = option(20, help="Rows of the table to print; 0: all.", least=0)
    operators: Sequence[str] | str = shared.operators()
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class TiersRequest:
    """The arguments of `trtopt.tiers`, which describes them."""

    model: str | os.PathLike[str] = field(metadata=shared.MODEL)
    output: str | os.PathLike[str] = field(
        metadata=about(help="Folder for engines, table, tiers.json and page.", short="-o", group="Usual", writes=FOLDER)
    )
    _: KW_ONLY
    images: Any = shared.images()
    data: Any = shared.data()
    limits: Sequence[str | float] = option(
        (), help="INT8 engines by tune within these, too: dB, or shares such as 99%.", metavar="DB[,DB]", typed=str
    )
    only: Sequence[str] = option(
        (), help="Of fp32, fp16, …; default: all that this TensorRT and the target have.", metavar="A[,B]", typed=str
    )
    batches: Sequence[int] = option(
        (), help="Batches to time; default: what the engines are tuned for.", metavar="N[,N]", typed=str, least=1
    )
    preprocess: Any = shared.preprocess()
    limit: int | None = shared.limit()
    batch: int = shared.batch()
    calib: str | os.PathLike[str] | Table | None = shared.table(
        help="A table instead of calibrating.", group="Calibration"
    )
    method: str = shared.method()
    allow_unusual_data: bool = shared.allow_unusual_data()
    precision_override: Sequence[str] = shared.precision_override()
    shapes: Sequence[str] | str | GivenProfile | Sequence[GivenProfile] = shared.shapes(group="Build")
    target: Sequence[str] | str = shared.target()
    backend: str = shared.backend()
    device: int = shared.gpu()
    optimization_level: int | None = option(None, help="0 (fast builds) to 5.")
    store: str | os.PathLike[str] | None = shared.store()
    classes: str | os.PathLike[str] | Sequence[str] | None = shared.classes(group="Judging")
    output_kind: Mapping[str, str] | Sequence[str] = shared.output_kind()
    plugins: Sequence[str] | str = shared.plugins(group="Custom operators")
    operators: Sequence[str] | str = shared.operators()
    log: str | os.PathLike[str] | None = shared.log(group="Output")
    reporter: Reporter = SILENT
