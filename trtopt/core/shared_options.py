"""Options that several stages share: each is described here once, and each call gives a request a field of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtopt.core.options import option


def images() -> Any:
    return option(None, help="Folder of real images.", metavar="DIR", typed=Path)


def data() -> Any:
    return option(None, help="Arrays: one per input name, first axis = samples.", metavar="F.npz|DIR", typed=Path)


def preprocess() -> Any:
    text = "imagenet, efficientnet-lite, yolo, or a file."
    return option(None, help=text, metavar="PRESET|FILE.toml", typed=str)


def method() -> Any:
    return option("auto", help="auto, entropy, mse, minmax or percentile.")


def limit() -> Any:
    return option(None, help="Use at most so many samples.", typed=int)


def batch() -> Any:
    return option(8, help="Samples at a time; the result doesn't depend on it.")


def threads() -> Any:
    return option(None, help="CPU threads; default: one per core.", typed=int)


def precision_override() -> Any:
    return option((), help="By node name or operator; repeatable.", metavar="PATTERN=PRECISION")


def shapes() -> Any:
    text = (
        "Range of an input's shape, e.g. x:1x3x224x224,8x3x224x224,32x3x224x224; of several inputs 'a:…;b:…', or "
        "--shapes again. The same input again begins another profile."
    )
    return option((), help=text, metavar="NAME:MIN,OPT,MAX[;…]")


def target() -> Any:
    return option((), help="Compute capabilities to build for (TensorRT-RTX).", metavar="smNN[,smNN]")


def backend() -> Any:
    return option("auto", help="auto, tensorrt or rtx.")


def trust_host_code() -> Any:
    return option(False, help="Run the library that a --version-compatible plan carries: if you trust it.")


def output_kind() -> Any:
    text = "What an output is: classes, embedding, boxes, mask, tokens or other; default: a guess. Repeatable."
    return option((), help=text, metavar="NAME=KIND")


def gpu() -> Any:
    return option(0, help="The GPU's number.")
