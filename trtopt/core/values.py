"""Values of requests: small frozen values that pass between the stages, checked when they are made."""

from __future__ import annotations

import difflib
import enum
import fnmatch
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.core.options import typed


class Precision(str, enum.Enum):
    """Arithmetic type of a layer."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"  # of weights alone

    @property
    def quantized(self) -> bool:
        return self in (Precision.INT8, Precision.FP8)

    def __str__(self) -> str:
        return self.value


COMPUTED = tuple(str(item) for item in Precision if item is not Precision.INT4)  # what a layer computes in
METHODS = ("auto", "entropy", "mse", "minmax", "percentile")
BACKENDS = ("auto", "tensorrt", "rtx")
CALIBRATORS = ("trtopt", "native")
SPARSITY = ("off", "keep", "prune")
HARDWARE_LEVELS = ("none", "ampere_plus", "same_compute_capability")
MIN_AGREEMENT = 0.95
"""What tools call "1 % accuracy loss" is measured with labels. Agreement counts every changed class, also from one wrong
class to another and back to the right one, so it falls several times as fast: the best INT8 scales of EfficientNet-Lite0
agree for 0.97 of unseen crops and lose none of the labelled photos (docs/results/accuracy-lite0.md)."""


def choice(value: str, allowed: Iterable[str], option: str) -> str:
    """`value` if it is one of `allowed`; else a UsageError naming both."""
    options = tuple(allowed)
    if value not in options:
        raise UsageError(f"{option} is {value!r}; allowed: {', '.join(options)}")
    return value


def chosen_builder(backend: str) -> str:
    """`backend` if it is one that builds; else a UsageError."""
    if backend == "lean":
        raise UsageError(
            "`backend='lean'`: the lean runtime runs engines and has no builder: build by the full TensorRT, with "
            "`version_compatible=True`, and open the engine by the lean runtime"
        )
    return choice(backend, BACKENDS, "`backend=`")


SHAPE = r"-?\d{1,18}(?:x-?\d{1,18})*"
EXAMPLE = "1x3x224x224,8x3x224x224,32x3x224x224"


@dataclass(frozen=True)
class ShapeRange:
    """The shapes one dynamic input may take, or the values of a shape input: min ≤ opt ≤ max in every place.

    >>> ShapeRange((1, 3, 224, 224), (8, 3, 224, 224), (32, 3, 224, 224))
    """

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.min) == len(self.opt) == len(self.max):
            raise UsageError(f"min {x(self.min)}, opt {x(self.opt)} and max {x(self.max)} differ in rank")
        for axis, (low, best, high) in enumerate(zip(self.min, self.opt, self.max)):
            if not low <= best <= high:
                raise UsageError(
                    f"min {x(self.min)}, opt {x(self.opt)}, max {x(self.max)}: dimension {axis} has "
                    f"{low}, {best}, {high}; needed: min ≤ opt ≤ max"
                )

    @classmethod
    @typed
    def parse(cls, text: str) -> ShapeRange:
        """Read `MIN,OPT,MAX`, each as 1x3x224x224; one shape alone stands for all three. UsageError where min ≤ opt ≤ max
        doesn't hold."""
        pieces = [piece.strip() for piece in text.split(",")]
        if len(pieces) not in (1, 3) or not all(re.fullmatch(SHAPE, piece) for piece in pieces):
            raise UsageError(f"{text!r} can't be read; write MIN,OPT,MAX such as {EXAMPLE}, or one shape for all three")
        shapes = [tuple(map(int, piece.split("x"))) for piece in pieces]
        return cls(*(shapes * 3 if len(shapes) == 1 else shapes))

    @property
    def static(self) -> bool:
        return self.min == self.max

    def holds(self, shape: Sequence[int]) -> bool:
        """Tell if a shape lies between `min` and `max`."""
        ranges = zip(self.min, shape, self.max)
        return len(shape) == len(self.min) and all(low <= size <= high for low, size, high in ranges)

    def __str__(self) -> str:
        return x(self.opt) if self.static else ",".join(map(x, (self.min, self.opt, self.max)))


class Kind(str, enum.Enum):
    """Meaning of an output, whose first axis counts samples: what it holds (`about`), the fewest `axes`, and of what a share
    is the same, which `min_agreement=` judges (`shared`; "": decibels judge it)."""

    about: str
    axes: str
    shared: str

    def __new__(cls, value: str, about: str = "", axes: str = "", shared: str = "") -> Kind:
        kind = str.__new__(cls, value)
        kind._value_, kind.about, kind.axes, kind.shared = value, about, axes, shared
        return kind

    CLASSES = "classes", "a score for each class; of three axes, of each row", "samples × classes", "classes"
    EMBEDDING = "embedding", "vectors that have a direction, one a sample or a position", "samples × width"
    BOXES = "boxes", "a detector's coordinates, with or without scores, along one axis", "samples × channels"
    MASK = "mask", "a score for each class and pixel; one channel: object or not", "samples × height × width", "pixels"
    TOKENS = "tokens", "a score for each class and position; or integers", "samples × classes, or integers", "tokens"
    RANKING = "ranking", "lists of what was found, such as TopK's indices", "samples × places", "list entries"
    OTHER = "other", "values", ""

    def __str__(self) -> str:
        return str(self.value)


Profile = Mapping[str, ShapeRange]
"""One optimization profile: input name → shape range."""

GivenProfile = Mapping[str, ShapeRange | str | Sequence[int] | Sequence[Sequence[int]]]
"""A profile as it may be given: a range may also be its text, one shape, or three (min, opt, max)."""


def x(shape: Sequence[int | str]) -> str:
    """A shape as people write it: 1x3x224x224; "scalar" without any size."""
    return "x".join(map(str, shape)) or "scalar"


def parse_targets(text: str | int | Iterable[str | int]) -> tuple[int, ...]:
    """Read compute capabilities: "sm89,sm120" or "8.9,12.0" → (89, 120); numbers are taken, too, and UsageError is raised for
    others."""
    items = [text] if isinstance(text, (str, int)) else text
    parts = [piece for item in items for piece in str(item).split(",")]
    targets = dict[int, None]()
    for part in (piece.strip().lower() for piece in parts):
        match = re.fullmatch(r"(?:sm_?)?(\d{2,3})|(\d{1,2})\.(\d)", part)  # and as NVIDIA's tables have them
        if not match:
            raise UsageError(f"`target=` {part!r} isn't a compute capability; write sm89 or sm89,sm120")
        targets[int(match[1] or f"{match[2]}{match[3]}")] = None
    return tuple(targets)


@dataclass(frozen=True)
class Override:
    """`PATTERN=PRECISION`: nodes whose name or operator matches the shell pattern run in that precision."""

    pattern: str
    precision: Precision

    @classmethod
    def parse(cls, text: str) -> Override:
        pattern, equals, precision = text.rpartition("=")
        if not equals or not pattern or precision not in COMPUTED:
            raise UsageError(
                f"`precision_override=` {text!r} can't be read; write PATTERN=fp32, "
                f"PATTERN a node name or operator, precision one of {', '.join(COMPUTED)}"
            )
        return cls(pattern, Precision(precision))

    def matches(self, node_name: str, op_type: str) -> bool:
        return fnmatch.fnmatchcase(node_name, self.pattern) or self.pattern == op_type


def overriding(overrides: Iterable[Override], node_name: str, op_type: str) -> Precision | None:
    """The precision that the last matching override asks for; None: none matches."""
    matching = (item.precision for item in reversed(tuple(overrides)) if item.matches(node_name, op_type))
    return next(matching, None)


def check_overrides(overrides: Iterable[Override], nodes: Iterable[Any]) -> None:
    """Raise UsageError for an override that matches none of these nodes (by their `name` and `op_type`), naming near ones."""
    nodes = list(nodes)
    for override in overrides:
        if any(override.matches(node.name, node.op_type) for node in nodes):
            continue
        names = dict.fromkeys([node.op_type for node in nodes] + [node.name for node in nodes])
        near = difflib.get_close_matches(override.pattern, names, 3)
        raise UsageError(
            f"`precision_override=['{override.pattern}={override.precision}']` matches no node"
            + (f"; near: {', '.join(near)}" if near else "")
            + ". Give a node's name (shell patterns such as '*/conv1*' work) or an operator: trtopt check MODEL --nodes lists "
            "them"
        )


@dataclass(frozen=True)
class Setting:
    """The way of an option to TensorRT's builder: the metadata of its field in `BuildSpec`.

    Attributes:
        flag, attribute: BuilderFlag that is set or cleared, member of IBuilderConfig that gets what isn't the default.
        layers: it makes other layers, so that an engine built again to look into it needs the same value.
        lacking, instead: what a TensorRT without it can't, and what to do; empty: every TensorRT has it.
    """

    flag: str = ""
    attribute: str = ""
    layers: bool = False
    lacking: str = ""
    instead: str = "drop it"

    def known(self, trt: Any) -> bool:
        """Tell whether a TensorRT module has it."""
        kind, name = (trt.BuilderFlag, self.flag) if self.flag else (trt.IBuilderConfig, self.attribute or "__init__")
        return hasattr(kind, name)


def _setting(default: Any, **how: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(**how)})


@dataclass(frozen=True)
class BuildSpec:
    """Everything a build depends on except the model and the scales.

    Attributes:
        precision, remainder: what the heavy layers run in, and what the rest does where they are quantized.
        profiles: of the model's own inputs; empty: static, or made from the model's own sizes.
        device: number of the GPU to build on; no part of what is asked for, and not described.

    The others are `BuildRequest`'s options, read.
    """

    precision: Precision = _setting(Precision.FP32, layers=True)
    remainder: Precision = _setting(Precision.FP16, layers=True)
    io_fp32: bool = _setting(True, layers=True)
    int4: bool = _setting(False, layers=True)
    embed_preprocess: bool = False
    overrides: tuple[Override, ...] = ()
    mark_output: tuple[str, ...] = ()
    write_out: tuple[str, ...] = ()
    profiles: tuple[Profile, ...] = ()
    targets: tuple[int, ...] = ()
    backend: str = "auto"
    calibrator: str = "trtopt"
    workspace: int | None = _setting(None, layers=True)
    optimization_level: int | None = _setting(None, attribute="builder_optimization_level", layers=True)
    max_aux_streams: int | None = _setting(None, attribute="max_aux_streams", layers=True)
    timing_cache: Path | None = _setting(None, lacking="has no timing cache")
    hardware_compatibility: str = _setting("none", layers=True)
    version_compatible: bool = _setting(
        False,
        flag="VERSION_COMPATIBLE",
        lacking="makes no version-compatible plans",
        instead="drop it and rebuild after an upgrade",
    )
    exclude_lean_runtime: bool = _setting(False, flag="EXCLUDE_LEAN_RUNTIME")
    strip: bool = _setting(
        False,
        flag="STRIP_PLAN",
        lacking="can't strip weights from a plan",
        instead="use `refit=True` alone, or drop it",
    )
    refit: bool = _setting(False, flag="REFIT", lacking="can't refit here")
    sparsity: str = _setting("off", flag="SPARSE_WEIGHTS", layers=True)
    tf32: bool = _setting(True, flag="TF32", layers=True)
    allow_precision_fallback: bool = False
    device: int = 0

    def __post_init__(self) -> None:
        chosen_builder(self.backend)
        choice(self.calibrator, CALIBRATORS, "`calibrator=`")
        choice(self.hardware_compatibility, HARDWARE_LEVELS, "`hardware_compatibility=`")
        choice(str(self.precision), COMPUTED, "`precision=`")
        choice(self.sparsity, SPARSITY, "`sparsity=`")
        if self.sparsity == "prune" and (self.precision not in (Precision.FP16, Precision.INT8) or self.int4):
            here = "INT4 codes" if self.int4 else self.precision.upper()
            raise UsageError(
                "`sparsity='prune'` is for `fp16=True` and `int8=True`, which TensorRT has 2:4 sparse kernels for; this is "
                f"{here}"
            )
        if self.remainder.quantized or self.remainder is Precision.INT4:
            raise UsageError(f"`remainder=` is {self.remainder}; allowed: fp32, fp16, bf16")
        if self.int4 and (self.refit or self.strip):
            option = "refit" if self.refit else "strip"
            raise UsageError(f"`int4=True` and `{option}=True`: INT4 codes can't be put in later; choose one")
        if self.calibrator == "native" and self.precision is not Precision.INT8:
            raise UsageError(
                f"`calibrator='native'` calibrates INT8; the precision asked for is {self.precision}: add `int8=True`"
            )
        if self.calibrator == "native" and self.embed_preprocess:
            raise UsageError(
                "`calibrator='native'` calibrates on the engine's own inputs, which `embed_preprocess=True` makes pixels: drop "
                "one of the two"
            )
        if self.workspace is not None and self.workspace <= 0:
            raise UsageError(f"`workspace=` is {self.workspace} bytes; a positive size is needed, such as 2GiB")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise UsageError(f"`optimization_level=` is {self.optimization_level}; allowed: 0 to 5")
        if self.max_aux_streams is not None and not 0 <= self.max_aux_streams < 1 << 31:
            raise UsageError(f"`max_aux_streams=` is {self.max_aux_streams}; allowed: 0 to {(1 << 31) - 1}")

    @property
    def base(self) -> Precision:
        """The floating type of everything that isn't quantized."""
        return self.remainder if self.precision.quantized else self.precision

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values, for the manifest and for cache keys."""
        from trtopt.core.documents import plain  # with msgspec, which only documents need

        described = plain(self)
        del described["device"]
        return {
            **described,
            "overrides": [f"{item.pattern}={item.precision}" for item in self.overrides],
            "profiles": [{name: str(shape) for name, shape in profile.items()} for profile in self.profiles],
            "targets": [f"sm{target}" for target in self.targets],
        }


SETTINGS = {item.name: item.metadata["setting"] for item in fields(BuildSpec) if item.metadata}


@dataclass(frozen=True)
class Kept:
    """A node that doesn't run in the precision asked for, and why."""

    node: str
    op: str
    precision: Precision
    reason: str


@dataclass(frozen=True)
class Issue:
    """Something in a model that TensorRT can't take: at a node, or a tensor; or at nobody's, whose `node` and `op` are
    empty."""

    node: str
    op: str
    reason: str

    def text(self, origin: str = "") -> str:
        """The issue in words; `origin`: where the node comes from, if the model has none of that name."""
        details = ", ".join(filter(None, (self.op, origin)))
        where = f"{self.node} ({details})" if details and self.node else self.node or details
        return f"{where}: {self.reason}" if where else self.reason

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class LayerInfo:
    """One layer as the built engine reports it.

    Attributes:
        kind: "convolution", "deconvolution", "matmul" or "other".
        precision: what it computes in (its input type); None: TensorRT doesn't say, as of what 8.6 makes one layer of.
        nodes: names of the ONNX nodes it came from, where the engine says.
        reads, writes: type and format of each tensor, in TensorRT's words; empty: not known.
        tactic: name or number of the kernel that TensorRT chose; empty: not known.
    """

    name: str
    kind: str
    precision: Precision | None
    nodes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    tactic: str = ""


@dataclass(frozen=True)
class TensorInfo:
    """A network input or output: shape with -1 (or the dimension's name) where dynamic, dtype as NumPy names it. Samples lie on
    `batch_axis`; None: nowhere, the whole array is of one sample."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] = field(default=())
    batch_axis: int | None = 0

    @property
    def numeric(self) -> bool:
        """Tell if it is a tensor of real numbers or booleans: no text, sequence, optional or complex numbers."""
        return self.floating or self.dtype.startswith(("int", "uint", "bool"))

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape in numbers: -1 where it is open."""
        return tuple(-1 if isinstance(size, str) else size for size in self.shape)

    @property
    def open_axes(self) -> tuple[int, ...]:
        """Places of the sizes that the model leaves open."""
        return tuple(axis for axis, size in enumerate(self.shape) if isinstance(size, str) or size < 0)

    @property
    def channels_last(self) -> bool:
        """Tell if an image's channels lie behind its sides."""
        return len(self.shape) == 4 and self.shape[3] in (1, 3, 4) and self.shape[1] not in (1, 3, 4)

    def dimension(self, axis: int) -> tuple[str, int] | str:
        """Return what has one size: a name, or a place of its own ("?" is how some exporters write "unknown")."""
        size = self.shape[axis]
        return size if isinstance(size, str) and size not in ("", "?") else (self.name, axis)

    @property
    def dims(self) -> str:
        """The shape for people: (batch, 3, ?, ?); "scalar" without any. Names that a program made up are "?" as well."""
        sizes = [str(size) if number >= 0 or named_size(size) else "?" for size, number in zip(self.shape, self.sizes)]
        return f"({', '.join(sizes)})" if sizes else "scalar"


def named_size(size: int | str) -> bool:
    """Tell if a size is open and has a name that says something; tf2onnx numbers those that have none: unk__12."""
    return isinstance(size, str) and size.isidentifier() and not size.startswith("unk__")


def parse_size(text: str | int, name: str) -> int:
    """Read a size in bytes: 2GiB, 512MiB, 1.5G, 1048576. UsageError calls it `name`."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(i?B)?", str(text).strip(), re.IGNORECASE)
    if not match:
        raise UsageError(f"{name} is {text!r}, which isn't a size; write 2GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def check_timeout(timeout: Any) -> None:
    """Raise UsageError unless it is None or a number of seconds: else it would fail only where a call has to wait."""
    if timeout is not None and not (isinstance(timeout, numbers.Real) and not math.isnan(timeout)):
        raise UsageError(f"timeout is {timeout!r}; a number of seconds is needed, or None to wait as long as it takes")


def parse_seconds(time: str | float, name: str) -> float:
    """Read a length of time in seconds: "2ms", "500us", "0.5s", or seconds as a number. UsageError calls it `name`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(us|ms|s)", time.strip()) if isinstance(time, str) else None
    if match:
        return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
    if isinstance(time, (int, float)) and not isinstance(time, bool) and 0 <= time < math.inf:
        return float(time)
    raise UsageError(
        f"{name} is {time!r}, which isn't a length of time; write a number with its unit, such as 2ms, 500us or 0.5s"
    )
