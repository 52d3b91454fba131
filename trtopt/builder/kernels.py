"""What an engine runs where TensorRT doesn't say it: the kernels that an inference launches.

TensorRT 8.6 gives one name to a whole region of a transformer ("ForeignNode") and its inspector nothing of what is inside.
CUPTI, a part of CUDA, tells the name of each kernel that is launched, and kernels of convolutions and matrix products name
the types that they multiply. The inference is run by a process of its own (`trtopt.runtime.kernel_run`): CUPTI must be there
before the GPU is used, and nothing of it shall stay in the caller's process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trtopt.builder.lowering import Lowered
from trtopt.core.errors import EngineError
from trtopt.core.files import whole
from trtopt.core.host import import_path
from trtopt.core.progress import Reporter
from trtopt.core.temporary import scratch
from trtopt.core.values import BuildSpec, LayerInfo, Precision
from trtopt.core.words import first_of
from trtopt.engine.manifest import HEAVY
from trtopt.trt.generation import BuiltPlan
from trtopt.trt.layers import HEAVY_OPS, profile_suffix

REGION = "ForeignNode"  # in the name of a layer that hides others
SECONDS = 300
# Attention (mha) has products, but no weights; __myl are kernels of several operators, three letters of each in the name.
_HEAVY = re.compile(r"gemm|gemv|fprop|dgrad|winograd|xmma|cutlass|[hi]mma|conv(?!er)|^__myl_.*(Dot|Fc|Gem|Mat|Cor)")
_LIGHT = re.compile(r"mha|[rR]eformat|split_?[kK]_?[rR]educ|^__myl_(?!.*(Dot|Fc|Gem|Mat|Cor))")
_TYPE = {
    "i8": Precision.INT8,
    "u8": Precision.INT8,
    "f16": Precision.FP16,
    "bf16": Precision.BF16,
    "f32": Precision.FP32,
    "e4m3": Precision.FP8,
    "e5m2": Precision.FP8,
}
_OPERANDS = re.compile(rf"_({'|'.join(_TYPE)})(?:{'|'.join(_TYPE)}|i32)_")  # TensorRT's: of A and of C, such as i8f32
_NAMED = (  # the first that matches: cuBLAS's, cuDNN's, and those of TensorRT's that name the type of a layout (FP16NHWCx8)
    (re.compile(r"(?i)bf16"), Precision.BF16),
    (re.compile(r"(?i)tf32"), Precision.FP32),
    (re.compile(r"(?i)int8|i8816|i16832|igemm|imma|_s8"), Precision.INT8),
    (re.compile(r"(?i)fp16|f16|[hs]884|[hs]1688|[hs]16816|hgemm|hmma"), Precision.FP16),
    (re.compile(r"(?i)fp32|f32|sgemm|ffma|scudnn"), Precision.FP32),
)


def seen_through(
    engine: BuiltPlan,
    lowered: Lowered,
    spec: BuildSpec,
    shapes: Sequence[Mapping[str, Sequence[int]]],
    reporter: Reporter,
) -> BuiltPlan:
    """The plan with the layers that TensorRT hides in regions, as the kernels of an inference tell of them.

    Args:
        shapes: of the engine's inputs, what each profile is tuned for.
    """
    regions = [layer.name for layer in engine.layers if REGION in layer.name]
    if not regions or spec.precision is Precision.FP32:
        return engine
    named_nodes = {node for layer in engine.layers for node in layer.nodes}
    graph = lowered.proto.graph
    nodes = {
        node.name: (node, kind)
        for node in graph.node
        if (kind := HEAVY_OPS.get(node.op_type)) and node.name not in named_nodes
    }
    if lowered.asked:
        asked_nodes = {name: lowered.asked[name] for name in nodes if name in lowered.asked}
    else:  # TensorRT chose between FP32 and this
        weights = {item.name for item in graph.initializer}
        weighted_nodes = [name for name, (node, _) in nodes.items() if weights.intersection(node.input)]
        asked_nodes = {name: lowered.layer_precision.get(name, spec.precision) for name in weighted_nodes}
    if not asked_nodes:
        return engine
    unseen = f"of what is in {first_of(regions, 2)} TensorRT says nothing"
    if len(set(asked_nodes.values())) > 1:
        return replace(engine, unseen=unseen)
    hidden_nodes = {name: nodes[name][1] for name in asked_nodes}
    precision = next(iter(asked_nodes.values()))
    # What may run in floating point there beside quantized nodes.
    others = len(nodes) - len(hidden_nodes) if precision.quantized else 0
    with reporter.phase("run it once, to see the kernels in regions that TensorRT says nothing of"):
        try:
            runs = launched(engine.plan, shapes, spec.device)
            return replace(engine, layers=with_hidden(engine.layers, hidden_nodes, others, precision, runs))
        except EngineError as error:
            return replace(engine, unseen=f"{unseen}, and its kernels tell nothing either: {error}")


def launched(
    plan: bytes | memoryview, shapes: Sequence[Mapping[str, Sequence[int]]], device: int = 0
) -> tuple[tuple[str, ...], ...]:
    """The names of the kernels of one inference at each of `shapes` (input → shape), in the order of their launch.

    Raises:
        EngineError: why there are none: no CUPTI, no GPU, or the inference failed.
    """
    with scratch() as folder:
        (folder / "run.engine").write_bytes(plan)
        (folder / "request.json").write_text(json.dumps({"shapes": list(shapes), "device": device}))
        command = [sys.executable, "-m", "trtopt.runtime.kernel_run", os.fspath(folder)]
        environment = {**os.environ, **import_path()}
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, timeout=SECONDS, check=False, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"the inference wasn't done after {SECONDS} s") from None
        try:
            answer = json.loads(whole(folder / "answer.json"))
        except (OSError, ValueError):
            last_lines = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise EngineError(": ".join([f"its process ended with status {run.returncode}", *last_lines])) from None
    if "problem" in answer:
        raise EngineError(answer["problem"])
    return tuple(tuple(names) for names in answer["kernels"])


def multiplies_in(kernel: str) -> Precision | None:
    """What a kernel multiplies in; None: it has no products, as far as its name tells.

    Raises:
        EngineError: it has, but its name doesn't tell of what.
    """
    if not _HEAVY.search(kernel) or _LIGHT.search(kernel):
        return None
    if operands := _OPERANDS.search(kernel):
        return _TYPE[operands[1]]
    for pattern, precision in _NAMED:
        if pattern.search(kernel):
            return precision
    raise EngineError(f"the name of the kernel {kernel} tells no type")


def with_hidden(
    layers: Sequence[LayerInfo],
    nodes: Mapping[str, str],
    others: int,
    precision: Precision,
    runs: Sequence[Sequence[str]],
) -> tuple[LayerInfo, ...]:
    """The layers, and one more for each node of a region, where the kernels leave no doubt that all of them run in
    `precision`.

    Each profile's run is counted by itself. Either it launches no kernel in another precision than those of the layers that
    TensorRT tells of, or there are kernels enough in this one for all nodes, and no more others than there may be.

    Args:
        layers: what TensorRT tells; those of the second profile on have it at the end of their names.
        nodes: of the regions, those that must run in `precision` → their layers' kinds.
        others: nodes with products that no layer names and that needn't (attention).
        runs: kernels by profile.
    """
    all_layers = list(layers)
    for number, kernels in enumerate(runs):
        end = f" [profile {number}]" if number else ""
        own = [layer for layer in layers if profile_suffix(layer.name) == end]
        layer_counts = Counter(layer.precision for layer in own if layer.kind in HEAVY)
        kernel_counts = Counter(filter(None, map(multiplies_in, kernels)))
        surplus = sum(count for item, count in (kernel_counts - layer_counts).items() if item is not precision)
        enough = kernel_counts[precision] - layer_counts[precision] >= len(nodes) and surplus <= others
        if not kernel_counts[precision] - layer_counts[precision] or (surplus and not enough):
            summary = ", ".join(f"{count} {item.upper()}" for item, count in kernel_counts.items()) or "none"
            raise EngineError(
                f"an inference launches these kernels with products: {summary}; {len(nodes)} nodes there should run in "
                f"{precision.upper()}"
            )
        all_layers += [
            LayerInfo(f"{node}, by its kernels{end}", kind, precision, (node,)) for node, kind in nodes.items()
        ]
    return tuple(all_layers)
