"""An engine built once more, with tensors inside it as outputs: what it computes there can be read then.

TensorRT has to write these tensors, so it may fuse less across them; which layers are quantized stays as it is, since that is
in the graph. Names of DequantizeLinear's results aren't for this: as an output such a tensor would be computed for itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto

from trtopt.builder.execute import kept_timing
from trtopt.core.errors import BackendError, UsageError
from trtopt.core.files import write_bytes
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import SETTINGS, BuildSpec, Precision, parse_targets
from trtopt.engine.manifest import Manifest, described_spec
from trtopt.graph.io import save_model
from trtopt.graph.passes import embed
from trtopt.graph.passes.quantize import is_quantized
from trtopt.graph.proto import infer_shapes, whole_copy
from trtopt.trt import select
from trtopt.trt.layers import HEAVY_OPS


def build_with_outputs(
    manifest: Manifest, graph: ModelProto, tensors: Collection[str], folder: Path, *, reporter: Reporter = SILENT
) -> Path:
    """Build the engine of a manifest for the GPU of this machine, and return the plan, which has no manifest.

    Args:
        graph: what TensorRT was given, as `save_onnx` kept it.
        tensors: of it, that become outputs besides its own.
        folder: where to write.
    """
    generation = select("rtx" if manifest.generation["family"] == "rtx" else "tensorrt")
    # The rest of what was asked for is in the graph, or says how a plan is kept.
    asked = described_spec(manifest.spec)
    layers = {name: getattr(asked, name) for name, item in SETTINGS.items() if item.layers}
    targets = parse_targets(manifest.targets)
    spec = BuildSpec(**layers, profiles=manifest.ranges, targets=targets, allow_precision_fallback=True)
    if asked.calibrator == "native":
        raise UsageError(
            "the engine's scales stand beside its graph, as TensorRT's own calibrator has them, and a graph with "
            "squeeze-and-excite on TensorRT 10: tensors can be compared where Q/DQ are in the graph"
        )
    if spec.precision.quantized and not is_quantized(graph):  # a part of it
        spec = replace(spec, precision=spec.base)
    wider = whole_copy(graph)
    values = {value.name: value for value in infer_shapes(graph).graph.value_info}
    own = {value.name for value in graph.graph.output}
    wider.graph.output.extend(values[name] for name in tensors if name in values and name not in own)
    path, plan = folder / "outputs.onnx", folder / "outputs.engine"
    save_model(wider, path)
    layer_precision, preferred = _precisions(manifest, graph)
    if generation.typed(spec) or spec.base is Precision.FP32:
        layer_precision, preferred = {}, {}
    if "timing_cache" in generation.capabilities.options:  # in which it finds what the engine's own build has timed
        spec = replace(spec, timing_cache=kept_timing(generation, generation.device(spec)))
    try:
        engine = generation.build(
            path,
            spec,
            quantized=is_quantized(graph),
            layer_precision=layer_precision,
            preferred=preferred,
            name="the engine with tensors inside it as outputs",
            reporter=reporter,
        )
    except BackendError as error:
        instead = "compare the tensors of its graph instead, which build keeps by `save_onnx=`"
        raise type(error)(f"{error}; {instead}") from error
    write_bytes(plan, engine.plan)
    return plan


def _precisions(manifest: Manifest, graph: ModelProto) -> tuple[dict[str, Precision], dict[str, Precision]]:
    """Return what nodes run in where the graph doesn't say it: what they must, and what the engine was seen to run them in."""
    heavy = {node.name: node.op_type in HEAVY_OPS for node in graph.graph.node}
    in_fp32 = [item["node"] for item in manifest.kept if item["precision"] == Precision.FP32 and item["node"] in heavy]
    pinned = dict.fromkeys([*in_fp32, *embed.arithmetic(graph)], Precision.FP32)
    seen = {name: Precision(layer["precision"]) for layer in manifest.layers for name in layer["nodes"]}
    preferred = {name: precision for name, precision in seen.items() if heavy.get(name) and not precision.quantized}
    return pinned, {name: precision for name, precision in preferred.items() if name not in pinned}
