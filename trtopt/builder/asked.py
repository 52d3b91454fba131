"""The specification that a request asks for: checked as far as its options, files and the model's inputs tell."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import sizes_of_samples
from trtopt.core.errors import UsageError
from trtopt.core.files import check_ending
from trtopt.core.options import named
from trtopt.core.shapes import DEFAULT_BATCH, batch_alone, by_input, parse_profiles, shapes_option
from trtopt.core.values import BuildSpec, Override, Precision, ShapeRange, parse_size, parse_targets
from trtopt.data.preprocess import Preprocess
from trtopt.graph.io import Model
from trtopt.graph.lengths import max_input_lengths
from trtopt.trt.profiles import validate_profiles

_SAME = {item.name for item in fields(BuildSpec)} & {item.name for item in fields(BuildRequest)} - {
    *("workspace", "timing_cache", "mark_output", "write_out")  # given as texts, and as any sequence
}
_LIMITS = ("min_snr", "min_agreement", "metric")
_OWN_SHAPES = "; `shapes=` are of the model's own inputs, with `embed_preprocess=True` too"


def spec_of(request: BuildRequest) -> BuildSpec:
    """Return the specification that a request asks for.

    Raises:
        UsageError: options that can't be right, or don't go together.
    """
    if request.fp16 and request.bf16:
        raise UsageError("`fp16=True` and `bf16=True` are both given; choose one")
    if request.int8 and request.fp8:
        raise UsageError("`int8=True` and `fp8=True` are both given; choose one: layers of both in one engine went")
    other = next(
        (name for name in ("best", "int8", "fp8", *_LIMITS) if getattr(request, name) not in (False, None)), ""
    )
    if request.int4 and other:
        why = "INT4 rounds weights alone, for products in FP16 or BF16; choose one"
        if other in _LIMITS:
            why = "no limit chooses INT4 weights: drop it, keep the graph by `save_onnx=`, and let trtopt verify judge that"
        raise UsageError(f"`int4=True` and {named(other, None if other in _LIMITS else True)} are both given: {why}")
    half = request.fp16 or request.int8 or request.fp8 or request.int4
    base = Precision.BF16 if request.bf16 else Precision.FP16 if half else Precision.FP32
    precision = Precision.INT8 if request.int8 else Precision.FP8 if request.fp8 else base
    overrides = tuple(map(Override.parse, request.precision_override))
    others = "fp32 only" if base is Precision.FP32 else f"{base} and fp32"
    for override in overrides:
        if (kind := override.precision) not in ((precision,) if kind.quantized else (Precision.FP32, base)):
            here = f"the build is {precision}" if kind.quantized else f"beside {precision} this build has {others}"
            raise UsageError(f"`precision_override=['{override.pattern}={kind}']` needs `{kind}=True`: {here}")
    cache = request.timing_cache
    return BuildSpec(
        **{name: getattr(request, name) for name in _SAME},
        precision=precision,
        remainder=base if precision.quantized else Precision.FP16,
        io_fp32=request.fp32_io,
        overrides=overrides,
        mark_output=tuple(request.mark_output),
        write_out=tuple(request.write_out),
        profiles=parse_profiles(request.shapes),
        targets=parse_targets(request.target),
        workspace=None if request.workspace is None else parse_size(request.workspace, "`workspace=`"),
        timing_cache=Path(cache) if cache and str(cache) != "none" else None,
    )


def _check_pruning(request: BuildRequest) -> None:
    """Raise UsageError for what would judge a pruned model by other weights, prune it several times, or has other scales."""
    if request.calib is not None:
        raise UsageError(
            "`sparsity='prune'` and `calib=` are both given: a table's scales are of other weights; give the samples, by which "
            "it prunes and measures (`images=DIR`, `data='F.npz'`)"
        )
    for name in ("best", "heal", "certify", "min_agreement", "metric"):
        if (value := getattr(request, name)) not in (False, None):
            option = named(name, True if value is True else None)
            raise UsageError(
                f"`sparsity='prune'` and {option} are both given: of limits it keeps `min_snr=` alone; drop {option}, keep the "
                "graph by `save_onnx=`, and let trtopt verify or certify judge the engine"
            )


def with_profiles(spec: BuildSpec, model: Model, preprocess: Preprocess | None, request: BuildRequest) -> BuildSpec:
    """`spec` with profiles that fit: the user's, checked, or the default where the batch is all that is open, or nothing but
    the size of the images, which their preparation says. What the error proposes has the sizes of the samples."""
    inputs, ends = model.inputs, max_input_lengths(model.proto)
    spec = replace(spec, profiles=by_input(spec.profiles, inputs))
    if spec.profiles or not any(item.open_axes for item in inputs):
        try:
            validate_profiles(inputs, spec.profiles, longest=ends)
        except UsageError as error:
            raise UsageError(f"{error}{_OWN_SHAPES if spec.embed_preprocess else ''}") from None
        if preprocess is not None:
            preprocess.check_profiles(inputs, spec.profiles)
        return spec
    sized_inputs = inputs if preprocess is None else preprocess.known(inputs)
    dynamic = [item for item in sized_inputs if item.open_axes]
    if not batch_alone(dynamic or sized_inputs):
        seen = sizes_of_samples(model, request)
        validate_profiles(inputs, (), longest=ends, seen=seen)  # raises, listing what is open
    profile = {
        item.name: ShapeRange(*((batch, *item.sizes[1:]) if item.open_axes else item.sizes for batch in DEFAULT_BATCH))
        for item in dynamic or sized_inputs
    }
    what = "one profile for batch {0} to {2}, tuned for {1}".format(*DEFAULT_BATCH)
    if not dynamic:
        what = "the size that images are prepared in"
    request.reporter.note(f"no `shapes=` given: {what} ({shapes_option(profile)})")
    return replace(spec, profiles=(profile,))


def check_outputs(request: BuildRequest) -> None:
    """Raise UsageError for outputs that can't be right; whether they can be written the call itself has seen."""
    if request.sparsity == "prune":
        _check_pruning(request)
    if request.save_cache is not None and request.calibrator != "native":
        raise UsageError(
            "`save_cache=` keeps what TensorRT's own calibrator wrote: add `calibrator='native'`; trtopt's own scales become "
            "a cache with trtopt calibrate --export-cache"
        )
    check_ending(request.output, (".onnx",), "an engine", "an ONNX model", ".engine", "; `save_onnx=` keeps its graph")
