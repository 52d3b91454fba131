"""The requests of `build` and `refit`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from trtopt.core import shared_options as shared
from trtopt.core.options import ENGINE, FILE, about, option
from trtopt.core.progress import SILENT, Reporter

_REDUCED = "`fp16=True`, `bf16=True`, `int8=True`, `fp8=True`, `int4=True` or `best=True`"
_QUANTIZED = "`int8=True`, `fp8=True` or `best=True`"

if TYPE_CHECKING:
    import onnx

    from trtopt.calibration.table import Table
    from trtopt.core.values import GivenProfile


@dataclass(frozen=True)
class BuildRequest:
    """The arguments of `trtopt.build`; `help` says what each does.

    The builder makes one engine, of the precision that is named; `best`, its limits and `compare`, which make several and
    measure them, are for `trtopt.autotune`.
    """

    model: str | os.PathLike[str] | onnx.ModelProto = field(metadata=shared.MODEL)
    output: str | os.PathLike[str] = field(
        metadata=about(
            help="The engine to write; its manifest lies beside it.", short="-o", group="Usual", writes=ENGINE
        )
    )
    _: KW_ONLY
    int8: bool = option(False, help="INT8, the rest in FP16.")
    fp16: bool = option(False, help="FP16.")
    images: Any = shared.images()
    data: Any = shared.data()
    min_snr: float | None = option(
        None,
        help="Limit for --int8 and --best; default beside another: 20 for embeddings, boxes, others. For --fp16 (30) and "
        "--bf16 (20) with data, what stays in FP32 follows from it.",
        metavar="DB",
    )
    preprocess: Any = shared.preprocess()
    limit: int | None = shared.limit()
    batch: int = shared.batch()
    embed_preprocess: bool = option(
        False, help="Take images as uint8 pixels, N x H x W x 3; all but resizing is done in the engine."
    )
    bf16: bool = option(False, help="BF16 (with --int8: the rest in BF16).", group="Precision")
    fp8: bool = option(False, help="FP8, the rest in FP16.")
    int4: bool = option(False, help="INT4 weights of matrix products, by samples if given; the rest in FP16.")
    best: bool = option(False, help="Time INT8 (or --fp8) and FP16 on this GPU; keep the fastest within the limits.")
    compare: bool = option(True, help="On a GPU, build for FP16 too and say how INT8 compares.")
    certify: bool = option(False, help="Hold the engine against itself and the model, as trtopt certify does.")
    heal: bool = option(False, help="Certify it; where it isn't right, try cures and keep the fastest engine that is.")
    precision_override: Sequence[str] = shared.precision_override(beside=_REDUCED)
    fp32_io: bool = option(True, help="Keep inputs and outputs FP32.")
    tf32: bool = option(True, help="Let FP32 layers use TF32.")
    allow_precision_fallback: bool = option(False, help="Accept an engine that lost the precision asked for.")
    calib: str | os.PathLike[str] | Table | None = shared.table(
        help="A table from trtopt calibrate, or a TensorRT cache.", group="Calibration"
    )
    method: str = shared.method(beside=_QUANTIZED)
    calibrator: str = option("trtopt", help="trtopt, or native (TensorRT 8.6 and 10).")
    allow_unusual_data: bool = shared.allow_unusual_data(beside=_QUANTIZED)
    save_calib: str | os.PathLike[str] | None = shared.written(
        help="Keep the scales, repairs and choice.", metavar="T.calib.json", beside=_QUANTIZED
    )
    save_cache: str | os.PathLike[str] | None = shared.written(
        help="Keep the native calibrator's cache.", metavar="OUT"
    )
    min_agreement: str | float | None = option(
        None,
        help=f"Limit for --int8 and --best: share of FP32's {shared.SHARED} (0.99 or 99%); default: 0.95 beside others.",
        metavar="SHARE",
        group="Limits",
    )
    labels: Any = shared.labels(help="True classes for a --metric that takes them, one number a line.")
    metric: Any = shared.metric(help="Limit for --int8: a function of the outputs, and --min.")
    min: float | None = shared.least()
    shapes: Sequence[str] | str | GivenProfile | Sequence[GivenProfile] = shared.shapes(group="Shapes")
    target: Sequence[str] | str = shared.target(group="Build")
    backend: str = shared.backend()
    device: int = option(0, help="The GPU to build on, and to time engines on.", least=0)
    workspace: str | int | None = option(None, help="Most scratch memory.", metavar="2GiB")
    optimization_level: int | None = option(None, help="0 (fast build) to 5.")
    max_aux_streams: int | None = option(
        None, help="Most auxiliary streams the engine may use, 0: none; default: TensorRT's choice."
    )
    timing_cache: str | os.PathLike[str] | None = option(
        None,
        help="Read and update this file; default: one for this GPU and TensorRT in the cache folder; none: neither.",
        metavar="FILE|none",
        typed=str,
        writes=FILE,
    )
    hardware_compatibility: str = option("none", help="none, ampere_plus or same_compute_capability.")
    version_compatible: bool = option(False, help="Runs on later versions, and on the lean runtime, which it carries.")
    exclude_lean_runtime: bool = option(
        False, help="Leave it out: runs on that version's lean runtime.", beside="`version_compatible=True`"
    )
    mark_output: Sequence[str] = option(
        (), help="Give this tensor, too, and fuse nothing across it; repeatable.", metavar="TENSOR"
    )
    write_out: Sequence[str] = option(
        (), help="Build this operator from the parts that ONNX defines it by; repeatable.", metavar="OPERATOR"
    )
    strip: bool = option(False, help="Leave the weights out of the plan.")
    refit: bool = option(False, help="Let weights be replaced later.")
    sparsity: str = option(
        "off",
        help="keep: 2:4 sparse kernels where weights are so; prune: make them so first, by samples if given.",
        metavar="off|keep|prune",
    )
    force: bool = option(False, help="Build even if the engine is up to date, or in the store.")
    store: str | os.PathLike[str] | None = shared.store()
    save_onnx: str | os.PathLike[str] | None = shared.written(
        help="Keep the graph TensorRT got.", metavar="OUT", group="Output"
    )
    classes: str | os.PathLike[str] | Sequence[str] | None = shared.classes()
    output_kind: Mapping[str, str] | Sequence[str] = shared.output_kind()
    plugins: Sequence[str] | str = shared.plugins(group="Custom operators")
    operators: Sequence[str] | str = shared.operators()
    log: str | os.PathLike[str] | None = shared.log(group="Output")
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class RefitRequest:
    """The arguments of `trtopt.refit`, which describes them."""

    engine: str | os.PathLike[str] = field(metadata=shared.ENGINE)
    model: str | os.PathLike[str] = field(
        metadata=about(help="The ONNX model that has the weights.", metavar="NEW.onnx")
    )
    output: str | os.PathLike[str] = field(
        metadata=about(help="The engine to write; its manifest lies beside it.", short="-o", writes=ENGINE)
    )
    _: KW_ONLY
    calib: str | os.PathLike[str] | Table | None = option(
        None, help="The calibration table that an INT8 or FP8 engine was built with.", metavar="T.calib.json"
    )
    device: int = shared.gpu()
    trust_host_code: bool = shared.trust_host_code()
    plugins: Sequence[str] | str = shared.plugins()
    reporter: Reporter = SILENT
