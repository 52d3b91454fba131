"""`init`: a recipe for the user's own model, with what is known of it and "?" for the rest."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import Plain
from trtopt.core.errors import ModelError, UsageError
from trtopt.core.files import check_writable, existing_file, write_bytes
from trtopt.core.options import taking
from trtopt.core.shapes import batch_alone, default_range
from trtopt.core.values import MIN_AGREEMENT, ShapeRange, TensorInfo, named_size
from trtopt.data.arrayfiles import stored_arrays
from trtopt.data.images import images_in
from trtopt.frontend.forward import Arguments
from trtopt.frontend.inputs import stated_inputs
from trtopt.frontend.modules import Source, opened
from trtopt.frontend.request import InitRequest
from trtopt.graph.io import load_model
from trtopt.graph.limits import OUTSIDE
from trtopt.graph.passes.quantize import is_quantized
from trtopt.recipes.loader import UNKNOWN, known_recipes, load_recipe

_COMMENTS = {
    "preprocess": 'As in training: "imagenet", "efficientnet-lite", "yolo", a .toml file or keys: docs/preprocessing.md.',
    "precision": "The fastest where the model stands it; fp16 needs no samples; bf16 and fp8 are there, too.",
    "min_agreement": "Share of the samples with FP32's class, token or pixel; other outputs: min_snr, in dB.",
    "shape": 'Such as ["batch", 3, 224, 224]; a name makes a size open.',
    "range": 'Least, best and most, such as "1x8,8x64,32x256": an engine takes nothing beyond the ends.',
}
_SCALED = "the model holds scales of its own, which are built as they are, without samples"
_TAKEN_AS = {"float64": "float32", "float16": "float32", "int32": "int64"}  # arrays' types, as modules take them


@dataclass(frozen=True)
class InitResult(Plain):
    """A recipe that `init` wrote.

    Attributes:
        recipe: the file.
        text: its content.
        unknown: keys that hold "?", such as "inputs.x.shape"; `pipeline` runs it when they are filled in.
        notes: facts about the model that the recipe follows.
        commands: what to type next.
    """

    recipe: Path
    source: str
    text: str
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    commands: tuple[str, ...]


@taking(InitRequest)
def init(request: InitRequest) -> InitResult:
    """Write a recipe for a model: its inputs and their ranges, how images are prepared, precision and accuracy limit.

    What neither the model nor an argument says is "?" in the file; nothing is run to find it.

    Args:
        source: an ONNX file, or what `export` takes: "FILE.py:FACTORY", "package.module:FACTORY", "torchvision:NAME".
        output: the recipe to write; default: NAME.toml in the current folder, NAME the model's.
        factory_arg: keyword arguments of the factory; not of an ONNX file.
        inputs: input name → shape, as for `export`; default: as the arrays of `data` are. An ONNX file has its own.
        images, data: what to calibrate on, a folder of images or arrays, one of them; the recipe names it.
        force: write over a recipe that is there.

    Raises:
        UsageError: a source that can't be right, samples that aren't there, or a recipe that is there already.
        MissingDependency, ModelError, InvalidModel: as `export` and `check`.
        OutputError: the file can't be written.
    """
    text = os.fspath(request.source)
    onnx = text.endswith(".onnx")
    if text in known_recipes() or text.endswith(".toml"):
        raise UsageError(f"{text} is a recipe already: trtopt pipeline {text} … runs it")
    if ":" not in text and not text.endswith((".onnx", ".py")):
        raise UsageError(
            f"{text!r} names no model: give FILE.onnx, FILE.py:FACTORY, package.module:FACTORY or torchvision:NAME"
        )
    for option in ("inputs", "factory_arg"):
        if onnx and getattr(request, option):
            raise UsageError(
                f"`{option}=` is for PyTorch models, and {text} is ONNX already: drop it (trtopt check {text} --set NAME:SHAPE "
                "--fix OUT.onnx sets sizes)"
            )
    if request.images is not None and request.data is not None:
        raise UsageError("`images=` and `data=` both say what to calibrate on: drop one of them")
    stem = re.sub(r"\W+", "_", Path(text).stem if onnx else text.rpartition(":")[2]).strip("_").lower() or "model"
    output = Path(request.output) if request.output is not None else Path(f"{stem}.toml")
    if output.suffix != ".toml":
        raise UsageError(f"`output=` is {output}: a recipe's name ends in .toml")
    check_writable(output)
    if output.exists() and not request.force:
        raise UsageError(f"{output} exists already: give another `output=`, or `force=True` to write over it")
    folder = output.resolve().parent
    samples = {}
    if request.images is not None:
        images_in(Path(request.images))
        samples["images"] = _relative(Path(request.images), folder)
    elif request.data is not None:
        data = Path(request.data)
        samples["data"] = _relative(data if data.is_dir() else existing_file(data, "`data=`"), folder)
    with request.reporter.phase("look at the model"):
        recipe, inputs, notes = _of_onnx(text, folder) if onnx else _of_module(request, folder)
    if recipe.get("preprocess") == UNKNOWN and "images" not in samples and (_SCALED in notes or samples):
        del recipe["preprocess"]  # no image is prepared
    recipe = {"description": text, **recipe, **samples, "precision": "int8", "min_agreement": MIN_AGREEMENT}
    tables = dict(_tables(inputs))
    unknown = [key for key, value in recipe.items() if value == UNKNOWN]
    unknown += [
        f"inputs.{name}.{key}" for name, table in tables.items() for key, value in table.items() if UNKNOWN in value
    ]
    lines = [f"# Written by trtopt init. Every key: trtopt/recipes/loader.py. {UNKNOWN}: fill it in.", *_lines(recipe)]
    for name, table in tables.items():
        lines += ["", f"[inputs.{json.dumps(name, ensure_ascii=False)}]", *_lines(table)]
    content = "\n".join(lines) + "\n"
    write_bytes(output, content.encode())
    if not unknown:
        load_recipe(output)
    command = ["trtopt", "pipeline", str(output), "-o", f"{output.stem}-out"]
    if not samples and _SCALED not in notes:
        command += ["--images", "DIR"] if "preprocess" in recipe else ["--data", "F.npz"]
    return InitResult(output, text, content, tuple(unknown), tuple(notes), (shlex.join(command),))


def _of_onnx(text: str, folder: Path) -> tuple[dict[str, Any], list[TensorInfo], list[str]]:
    path = existing_file(text, "the model")
    model = load_model(path, lazy=True)
    if odd := next((info for info in model.inputs if not info.numeric), None):
        raise ModelError(f"{path}: the input {odd.name} is of type {odd.dtype}, which TensorRT hasn't; {OUTSIDE}")
    inputs = []
    for info in model.inputs:
        names = ["batch", *(re.sub(r"\W", "_", f"{info.name}_{axis}") for axis in range(1, len(info.shape)))]
        fixed = ((size if isinstance(size, int) and size > 0 else None) for size in info.shape)
        shape = [size or (own if named_size(own) else name) for size, own, name in zip(fixed, info.shape, names)]
        if shape:  # a single number has no range
            inputs.append(TensorInfo(info.name, info.dtype, tuple(shape)))
    notes = [_SCALED] if is_quantized(model.proto) else []
    return {"source": _relative(path, folder), **_prepared(inputs, None)}, inputs, notes


def _of_module(request: InitRequest, folder: Path) -> tuple[dict[str, Any], list[TensorInfo], list[str]]:
    text = os.fspath(request.source)
    with opened(text, None, request.factory_arg) as source:
        inputs = list(stated_inputs(source, request.inputs)[0]) if request.inputs else list(source.inputs)
        notes = list(source.notes)
        inputs = inputs or _as_arrays(source, request.data)
    module, _, factory = text.rpartition(":")
    if not text.startswith("torchvision:"):
        if not module.endswith(".py") and Path(f"{module}.py").is_file():
            module += ".py"  # so that `pipeline` sees when it changes
        module = _relative(Path(module), folder) if module.endswith(".py") else module
    options = {"options": dict(request.factory_arg)} if request.factory_arg else {}
    return {"source": f"{module}:{factory}", **options, **_prepared(inputs, source.preprocess)}, inputs, notes


def _as_arrays(source: Source, data: str | os.PathLike[str] | None) -> list[TensorInfo]:
    """Return forward's inputs as an .npz file has them, and "?" for a shape that it doesn't say."""
    held = stored_arrays(Path(data)) if data is not None and Path(data).suffix == ".npz" else {}
    takes = Arguments(source.module)
    names = takes.required or takes.ordered[:1] or ["input"]
    names = [*names, *(name for name in takes.names if name in held and name not in names)]
    return [
        TensorInfo(name, _TAKEN_AS.get(held[name].dtype.name, held[name].dtype.name), ("batch", *held[name].shape[1:]))
        if name in held
        else TensorInfo(name, UNKNOWN, (UNKNOWN,))
        for name in names
    ]


def _prepared(inputs: Sequence[TensorInfo], known: Any) -> dict[str, Any]:
    """Return the key `preprocess` for a model of one image; pixels as they are need none."""
    image = len(inputs) == 1 and len(inputs[0].shape) == 4 and inputs[0].dtype != "uint8"
    channels = inputs[0].shape[3 if inputs[0].channels_last else 1] if image else 0
    if known is None and not (channels in (1, 3) or isinstance(channels, str)):
        return {}
    return {"preprocess": UNKNOWN if known is None else known}


def _tables(inputs: Sequence[TensorInfo]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the keys of each input's table; ranges are known where only the number of samples is open."""
    needing = [info for info in inputs if info.open_axes]
    for info in inputs:
        table: dict[str, Any] = {"shape": list(info.shape)}
        if info.dtype != "float32":
            table["dtype"] = info.dtype
        if info.open_axes and UNKNOWN not in info.shape:
            table["range"] = UNKNOWN
            if batch_alone(needing):
                sizes = [
                    default_range(info, axis, True) if isinstance(size, str) else (size,) * 3
                    for axis, size in enumerate(info.shape)
                ]
                table["range"] = str(ShapeRange(*zip(*sizes)))
        yield info.name, table


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if key in _COMMENTS and (key in ("precision", "min_agreement") or UNKNOWN in value):
            yield f"# {_COMMENTS[key]}"
        yield f"{key} = {_toml(value)}"


def _relative(path: Path, folder: Path) -> str:
    whole = path.resolve()
    return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else str(whole)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(str(key))} = {_toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if not isinstance(value, (str, bool, int, float)):
        raise UsageError(f"{value!r} can't be written into a recipe: TOML has text, numbers, true, false and lists")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
