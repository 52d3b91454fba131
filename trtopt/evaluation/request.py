"""Requests of `verify` and `bench`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from trtopt.core import shared_options as shared
from trtopt.core.options import about, option
from trtopt.core.progress import SILENT, Reporter

if TYPE_CHECKING:
    from onnx import ModelProto

    from trtopt.evaluation.agreement import Runner


@dataclass(frozen=True)
class VerifyRequest:
    """The arguments of `trtopt.verify`, which describes them."""

    reference: str | os.PathLike[str] | ModelProto = field(
        metadata=about(help="Usually the FP32 model.", metavar="REFERENCE.onnx")
    )
    candidate: str | os.PathLike[str] | ModelProto | Runner = field(
        metadata=about(help="What build --save-onnx wrote, or an engine.", metavar="CANDIDATE")
    )
    batches: Any = None  # as `data`, by position
    labels: Any = shared.labels(help="True classes, one number a line, in the order of the samples.")
    threads: int | None = shared.threads()
    _: KW_ONLY
    images: Any = shared.images()
    data: Any = shared.data()
    preprocess: Any = shared.preprocess(beside=shared.SAMPLES)
    limit: int | None = shared.limit()
    batch: int = shared.batch()
    output_kind: Mapping[str, str] | Sequence[str] = shared.output_kind()
    classes: str | os.PathLike[str] | Sequence[str] | None = shared.classes()
    min_agreement: str | float | None = option(
        None,
        help=f"Least share of {shared.SHARED} (0.99 or 99%); default: 0.95 where least dB are given, else not judged.",
        metavar="SHARE",
    )
    min_snr: float | None = option(
        None,
        help="Least dB of each output; default: 20 where a share is given and its kind has no share, else not judged.",
        metavar="DB",
    )
    metric: Any = shared.metric(help="A function of the outputs, for both; judged with --min.")
    min: float | None = shared.least(beside="`metric='MODULE:FUNCTION'`")
    per_layer: bool = option(
        False,
        help="Compare tensor by tensor too, and say where it breaks; an engine's by building it with these as outputs.",
    )
    plugins: Sequence[str] | str = shared.plugins()
    operators: Sequence[str] | str = shared.operators()
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class BenchRequest:
    """The arguments of `trtopt.bench`, which describes them."""

    engine: str | os.PathLike[str] = field(metadata=shared.ENGINE)
    _: KW_ONLY
    against: Sequence[str] = option((), help="torch, onnxruntime.", metavar="NAME[,NAME]", typed=str)
    batch: Sequence[int] = option(
        (), help="Samples at a time; default: what it is tuned for.", metavar="N[,N]", typed=str, least=1
    )
    streams: int = option(1, help="Threads calling at once, for the throughput.", least=1)
    iterations: int = option(200, help="Calls of each kind.", least=1)
    warmup: int = option(20, help="Calls before, not counted.", least=0)
    model: str | os.PathLike[str] | None = option(
        None,
        help="For ONNX Runtime; default: the engine's source.",
        metavar="M.onnx",
        beside="`against=['onnxruntime']`",
    )
    source: str | None = option(
        None, help="For PyTorch: torchvision:NAME, module:factory, or a recipe.", beside="`against=['torch']`"
    )
    backend: str = shared.backend()
    device: int = shared.gpu()
    trust: bool = shared.trust()
    trust_host_code: bool = shared.trust_host_code()
    plugins: Sequence[str] | str = shared.plugins()
    reporter: Reporter = SILENT
