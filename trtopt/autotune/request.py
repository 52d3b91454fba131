"""Requests of `tune` and `sensitivity`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from trtopt.builder.request import BuildRequest
from trtopt.core import shared_options as shared
from trtopt.core.options import option
from trtopt.core.progress import SILENT, Reporter

if TYPE_CHECKING:
    from onnx import ModelProto

    from trtopt.calibration.table import Table


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
