"""Requests of `export` and `init`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.core import shared_options as shared
from trtopt.core.options import FILE, about, option
from trtopt.core.progress import SILENT, Reporter

if TYPE_CHECKING:
    import torch  # noqa: TID251

    from trtopt.frontend.inputs import InputSpec
    from trtopt.frontend.samples import Sample

_factory_arg = partial(
    option, None, help="An argument of the class or factory; repeatable.", metavar="NAME=VALUE", typed=list[str]
)
_inputs = partial(option, None, metavar="NAME:batchx3x224x224", typed=list[str])
TOLERANCE = 1e-3  # of the largest output; FP32 models differ by about 1e-6


@dataclass(frozen=True)
class InitRequest:
    """The arguments of `trtopt.init`, which describes them."""

    source: str | os.PathLike[str] = field(
        metadata=about(help="An ONNX file, FILE.py:CLASS, module:factory, torchvision:NAME; or operator.", typed=str)
    )
    output: str | os.PathLike[str] | None = shared.written(
        help="The recipe to write; default: NAME.toml, NAME the model's.", metavar="F.toml", short="-o"
    )
    name: str | None = option(
        None, help="After operator: its name, such as acme::Swishy, of which a project is written.", positional=True
    )
    _: KW_ONLY
    factory_arg: Mapping[str, Any] | None = _factory_arg()
    inputs: InputSpec | None = _inputs(help="Shape of an input, as for export; default: as the arrays of --data.")
    images: str | os.PathLike[str] | None = shared.images(help="Folder of real images to calibrate on.")
    data: str | os.PathLike[str] | None = shared.data()
    force: bool = option(False, help="Write over a recipe that is there.")
    reporter: Reporter = SILENT


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of `trtopt.export`, which describes them."""

    source: str | os.PathLike[str] | torch.nn.Module = field(
        metadata=about(
            help="torchvision:NAME, FILE.py:CLASS or module:factory (in this folder or installed), or a recipe.",
            typed=str,
        )
    )
    output: str | os.PathLike[str] = field(metadata=about(help="The ONNX file to write.", short="-o", writes=FILE))
    _: KW_ONLY
    opset: int | None = option(None, help="ONNX opset; default: what every generation reads.")
    weights: str | os.PathLike[str] | None = option(None, help="A state dict (weights only).")
    factory_arg: Mapping[str, Any] | None = _factory_arg()
    inputs: InputSpec | None = _inputs(
        help="Shape of an input, names where dynamic, :int64 after it if so; repeatable."
    )
    output_names: Sequence[str] | None = option(
        None, help="In order; repeatable.", metavar="NAME[,NAME]", typed=list[str]
    )
    sample: Sample | None = option(None, help="Real inputs to compare on: .npz, .npy, images.", typed=Path)
    preprocess: Any = shared.preprocess()
    tolerance: float = option(TOLERANCE, help="Largest relative difference.", beside="`verify=True`")
    verify: bool = option(True, help="Compare with PyTorch.")
    reporter: Reporter = SILENT
