"""Options that several stages share: each is described here once, and each call gives a request a field of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from trtopt.core.options import FILE, about, option
from trtopt.core.values import METHODS, Kind

SAMPLES = "`images=DIR` or `data='F.npz'`"  # what options of samples belong to
MODEL = about(help="An ONNX model.", metavar="MODEL.onnx")  # of a field without a default
ENGINE = about(help="A TensorRT plan.", metavar="M.engine")
table = partial(option, None, metavar="T.calib.json")
images = partial(option, None, help="Folder of real images.", metavar="DIR", typed=Path)
data = partial(
    option, None, help="Arrays as the model takes them: one per input name.", metavar="F.npz|DIR", typed=Path
)
preprocess = partial(
    option, None, help="imagenet, efficientnet-lite, yolo, or a file.", metavar="PRESET|FILE.toml", typed=str
)
method = partial(option, "auto", help=f"{', '.join(METHODS[:-1])} or {METHODS[-1]}.")
limit = partial(option, None, help="Use at most so many samples.", least=1, beside=SAMPLES)
batch = partial(option, 8, help="Samples at a time; the result doesn't depend on it.", least=1, beside=SAMPLES)
threads = partial(option, None, help="CPU threads; default: one per core.", least=1)
precision_override = partial(option, (), help="By node name or operator; repeatable.", metavar="PATTERN=PRECISION")
shapes = partial(
    option,
    (),
    help="Range of an input's shape, e.g. x:1x3x224x224,8x3x224x224,32x3x224x224; of several inputs 'a:…;b:…', or "
    "--shapes again; or of a size by its name, batch:1,8,32. The same again begins another profile.",
    metavar="NAME:MIN,OPT,MAX[;…]",
)
target = partial(option, (), help="Compute capabilities to build for (TensorRT-RTX).", metavar="smNN[,smNN]")
backend = partial(option, "auto", help="auto, tensorrt or rtx.")
trust = partial(option, False, help="Load a plan that no manifest describes: if you trust it.")
trust_host_code = partial(
    option, False, help="Run the library that a --version-compatible plan carries: if you trust it."
)
SHARED = ", ".join(kind.shared for kind in Kind if kind.shared)  # of what there are shares
labels = partial(option, None, help="True classes, one number a line.", metavar="FILE", typed=Path)
metric = partial(option, None, metavar="MODULE:FUNCTION", typed=str)
least = partial(option, None, help="Least that --metric must give.", metavar="X")
allow_unusual_data = partial(option, False, help="Take copies of one sample, refused otherwise.")
output_kind = partial(
    option, (), help=f"What an output is: {', '.join(Kind)}; default: a guess. Repeatable.", metavar="NAME=KIND"
)
classes = partial(option, None, help="Class names, one a line; or imagenet.", metavar="FILE", typed=str)
written = partial(option, None, writes=FILE)
report = partial(written, help="Write a page on the engine, as trtopt report does.", metavar="F.html")
plugins = partial(
    option,
    (),
    help="TensorRT plugins, a library or a Python module; repeatable. Also $TRTOPT_PLUGINS.",
    metavar="LIB.so|M.py",
)
operators = partial(
    option,
    (),
    help="What custom operators compute, in Python (docs/custom-operators.md); repeatable.",
    metavar="OPS.py",
)
log = partial(written, help="Write what is said into a file, with TensorRT's own messages (-v: all).", metavar="F.log")
gpu = partial(option, 0, help="The GPU's number.", least=0)
store = partial(
    option,
    None,
    help="Engine store: local (in the cache folder), or a folder; default: $TRTOPT_STORE.",
    metavar="local|FOLDER|none",
    typed=str,
)
