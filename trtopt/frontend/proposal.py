"""A recipe for the user's own model: what can be seen of it, and what is guessed, each guess with its reason in the file."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from trtopt.calibration.expected import check_preprocessing, first_layers, statistics
from trtopt.core.documents import Plain
from trtopt.core.errors import MissingDependency, ModelError, TrtoptError, UsageError, require
from trtopt.core.files import check_writable, existing_file, write_bytes
from trtopt.core.library_output import quiet
from trtopt.core.options import taking
from trtopt.core.shapes import batch_alone, default_range
from trtopt.core.values import MIN_AGREEMENT, ShapeRange, TensorInfo, named_size
from trtopt.data import open_data
from trtopt.data.arrayfiles import stored_arrays
from trtopt.data.images import images_in
from trtopt.frontend.factories import SEED
from trtopt.frontend.forward import Arguments, example, leaves
from trtopt.frontend.inputs import stated_inputs
from trtopt.frontend.modules import Source, opened
from trtopt.frontend.request import InitRequest
from trtopt.frontend.samples import PHOTOS
from trtopt.graph.io import Model, load_model
from trtopt.graph.limits import OUTSIDE
from trtopt.graph.output_kinds import resolve
from trtopt.graph.passes.quantize import is_quantized
from trtopt.recipes.loader import known_recipes, load_recipe, package_file

SIZES = (224, 32, 28, 64, 96, 128, 256, 299, 384, 512)  # pixels
SEQUENCE = 16
LENGTH = 8 * SEQUENCE  # of a signal
MASK = "attention_mask"  # optional in transformers' models
TRIES = 200  # of a module's forward
TRIED = 16  # images that are decoded, to see whether they can be
_TAKEN_AS = {"float64": "float32", "float16": "float32", "int32": "int64"}  # arrays' types, as modules take them
_TOKENS = re.compile(r"ids|mask|token")
_PIXELS = "The input takes pixels as they are. Guessed: how an image is brought to its size."
# What models are trained with most, from none to mean and deviation.
_PREPARED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ImageNet's mean and deviation", {"preset": "imagenet"}),
    ("pixels from 0 to 1", {"scale": "1/255"}),
    ("pixels from -1 to 1", {"scale": "1/255", "mean": 0.5, "std": 0.5}),
    ("pixels from 0 to 255", {}),
)


@dataclass(frozen=True)
class InitResult(Plain):
    """What `init` wrote.

    Attributes:
        recipe: the file.
        text: what it holds.
        guesses: what was guessed in it, and why; the file has them as comments.
        commands: what to type next.
    """

    recipe: Path
    source: str
    text: str
    guesses: tuple[str, ...]
    commands: tuple[str, ...]


@dataclass(frozen=True)
class _Subject:
    """What is known of a model; `takes`: all inputs, as samples are given for them, `inputs`: those that the recipe has;
    `notes`: comments, by the key that they stand over; `scaled`: whether it holds Q/DQ; `spans`: least, best and most of named
    sizes."""

    source: str
    description: str
    takes: tuple[TensorInfo, ...]
    inputs: tuple[TensorInfo, ...]
    notes: Mapping[str, str]
    preprocess: str | Mapping[str, Any] | None = None
    scaled: bool = False
    spans: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)


@taking(InitRequest)
def init(request: InitRequest) -> InitResult:
    """Write a recipe for a model: its inputs and their ranges, how images are prepared, precision and accuracy limit.

    What isn't in the model is guessed, and the file says so over each guess. A PyTorch module without known inputs is called
    with inputs such as its layers take, those first that arrays of an .npz file given as `data` fit, until it gives something
    for each sample.

    Args:
        source: an ONNX file, or what `export` takes: "FILE.py:FACTORY", "package.module:FACTORY", "torchvision:NAME".
        output: the recipe to write; default: NAME.toml in the current folder, NAME the model's.
        factory_arg: keyword arguments of the factory; not of an ONNX file.
        inputs: input name → shape, as for `export`; default: found by trying what the samples fit. An ONNX file has its own.
        images, data: what to calibrate on, a folder of images or arrays, one of them; the recipe names it.
        force: write over a recipe that is there.

    Raises:
        UsageError: a source that can't be right, inputs that can't be found, images for a model that takes none, samples that
            aren't there or don't fit, or a recipe that is there already.
        DataError: samples that can't be read.
        MissingDependency, ModelError, InvalidModel: as `export` and `check`.
        OutputError: the file can't be written.
    """
    text = os.fspath(request.source)
    if text in known_recipes() or text.endswith(".toml"):
        raise UsageError(f"{text} is a recipe already: trtopt pipeline {text} … runs it")
    if ":" not in text and not text.endswith((".onnx", ".py")):
        raise UsageError(
            f"{text!r} names no model: give FILE.onnx, FILE.py:FACTORY, package.module:FACTORY or torchvision:NAME"
        )
    if text.endswith(".onnx"):
        if request.inputs:
            raise UsageError(
                f"`inputs=` is for PyTorch models, and {text} has inputs of its own: trtopt check {text} --set NAME:SHAPE "
                "--fix OUT.onnx sets their sizes; give OUT.onnx then"
            )
        if request.factory_arg:
            raise UsageError(
                f"`factory_arg=` is for the factory of a PyTorch model, and {text} is a model already: drop it"
            )
    if request.images is not None and request.data is not None:
        raise UsageError("`images=` and `data=` both say what to calibrate on: drop one of them")
    stem = (
        re.sub(r"\W+", "_", Path(text).stem if text.endswith(".onnx") else text.rpartition(":")[2]).strip("_").lower()
    )
    output = Path(request.output) if request.output is not None else Path(f"{stem or 'model'}.toml")
    if output.suffix != ".toml":
        raise UsageError(f"`output=` is {output}: a recipe's name ends in .toml")
    check_writable(output)
    if output.exists() and not request.force:
        raise UsageError(f"{output} exists already: give another `output=`, or `force=True` to write over it")
    folder = output.resolve().parent
    images = None if request.images is None else images_in(Path(request.images))[:TRIED]
    if request.data is not None and not Path(request.data).is_dir():
        existing_file(request.data, "`data=`")
    with request.reporter.phase("look at the model"):
        subject = _onnx(text, folder) if text.endswith(".onnx") else _torch(request, folder)
    if images is not None and _image(subject.inputs) is None:
        raise UsageError(f"`images=` is given, and {_arrays(subject)} aren't images: give `data='F.npz'` instead")
    with request.reporter.phase("look at the samples"):
        if images is not None:
            open_data(
                [TensorInfo(item.name, item.dtype, item.sizes) for item in subject.takes],
                images=images,
                preprocess=subject.preprocess,
            )
        elif request.data is not None:
            open_data(subject.takes, data=request.data)
    content, guesses = _written(subject, request, folder)
    write_bytes(output, content.encode())
    load_recipe(output)
    return InitResult(output, text, content, guesses, _commands(subject, request, output))


# What a model shows ------------------------------------------------------------------------------------------------------


def _onnx(text: str, folder: Path) -> _Subject:
    path = existing_file(text, "the model")
    model = load_model(path, lazy=True)
    if odd := next((info for info in model.inputs if not info.numeric), None):
        raise ModelError(f"{path}: the input {odd.name} is of type {odd.dtype}, which TensorRT hasn't; {OUTSIDE}")
    inputs, left_out = [], []
    for info in model.inputs:
        if info.shape and 0 not in info.shape:
            inputs.append(_named(info))
        else:
            left_out.append(info.name)
    kinds = ", ".join(f"{name}: {kind}" for name, kind in resolve(model.proto, model.outputs).items())
    notes = {"min_agreement": f"The outputs seem to be {kinds}."}
    if left_out:
        notes["inputs"] = f"Scalars have no range and stand nowhere here: {', '.join(left_out)}."
    prepared = None
    if (image := _image(inputs)) is not None:
        prepared, notes["preprocess"] = _trained_with(model, image)
    description = f"{path.name}: opset {model.opset}, {len(model.proto.graph.node)} nodes"
    scaled = is_quantized(model.proto)
    return _Subject(_place(path.resolve(), folder), description, model.inputs, tuple(inputs), notes, prepared, scaled)


def _place(path: Path, folder: Path) -> str:
    """A file as a recipe in `folder` names it: of an installed package, below the folder, or whole."""
    for entry in map(Path, filter(None, sys.path)):
        if "site-packages" in entry.parts and path.is_relative_to(entry):
            package, *rest = path.relative_to(entry).parts
            if rest and package.isidentifier():
                return f"package:{package}/{'/'.join(rest)}"
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _named(info: TensorInfo) -> TensorInfo:
    """The input with names for the sizes that the model leaves open."""
    tokens = info.dtype.startswith(("int", "uint")) and len(info.shape) == 2
    usual = {0: "batch"}
    if len(info.shape) == 4:
        usual |= {1: "height", 2: "width"} if info.channels_last else {2: "height", 3: "width"}
    if tokens:
        usual[1] = "sequence"
    shape = tuple(
        size
        if not isinstance(size, str) and size > 0
        else size
        if named_size(size)
        else usual.get(axis, re.sub(r"\W", "_", f"{info.name}_{axis}"))
        for axis, size in enumerate(info.shape)
    )
    return TensorInfo(info.name, info.dtype, shape)


def _image(inputs: Sequence[TensorInfo]) -> TensorInfo | None:
    """The input, if it is the only one and takes an image."""
    if len(inputs) != 1 or len(inputs[0].shape) != 4:
        return None
    channels = inputs[0].shape[3 if inputs[0].channels_last else 1]
    return inputs[0] if channels in (1, 3) or isinstance(channels, str) else None


def _layout(image: TensorInfo) -> dict[str, Any]:
    """Keys of a preprocessing that the input's shape decides."""
    last = image.channels_last
    height, width = image.shape[1:3] if last else image.shape[2:4]
    keys: dict[str, Any] = {"layout": "nhwc"} if last else {}
    if image.shape[3 if last else 1] == 1:
        keys["channels"] = "gray"
    if isinstance(height, str) or isinstance(width, str):
        sides = [size if isinstance(size, int) else 320 for size in (height, width)]
        keys |= {"size": sides, "resize": "letterbox"}
    return keys


def _trained_with(model: Model, image: TensorInfo) -> tuple[dict[str, Any], str]:
    """The preprocessing that brings photos nearest to what the model was trained on, and how that is known."""
    keys = _layout(image)
    gray = keys.get("channels") == "gray"
    usual = {"scale": "1/255", **keys} if gray else {"preset": "imagenet", **keys}
    if image.dtype == "uint8":
        return keys, _PIXELS
    photos = _photos()
    recorded = statistics(model.proto)
    if recorded is None or not photos:
        why = "the model doesn't tell what it was trained with" if photos else "scikit-image's photos aren't installed"
        return usual, f"A guess, no more, for {why}: use what your training used; docs/preprocessing.md has the keys."
    candidates = []
    part = first_layers(model.proto)
    for words, prepared in _PREPARED:
        changed = {**prepared, **keys}
        if gray and "preset" in changed:
            continue
        with_size = [TensorInfo(image.name, image.dtype, image.sizes)]
        try:
            batch = next(iter(open_data(with_size, images=photos, preprocess=changed, batch=len(photos))))
        except TrtoptError:
            continue
        samples = [{image.name: array[None]} for array in batch[image.name]]
        result = check_preprocessing(part, samples)
        if result["checked"] and result["shift"] is not None:
            candidates.append(
                (result["shift"] + abs(math.log(max(result["spread"], 1e-9))), words, changed, result["by"])
            )
    if not candidates:
        return usual, "A guess, no more: the model's first layers couldn't be run alone. Use what your training used."
    candidates.sort(key=lambda item: item[0])
    distance, words, changed, by = candidates[0]
    others = ", ".join(f"{words} {far:.2g}" for far, words, *_ in candidates[1:])
    return changed, (
        f"A guess: with {words}, photos come nearest to what {by} saw in training ({distance:.2g}; {others}; 0 is the same). "
        "Nothing tells RGB from BGR, or how an image is brought to its size."
    )


def _photos() -> list[Path]:
    try:
        return [package_file(f"package:skimage/data/{name}") for name in PHOTOS]
    except MissingDependency:
        return []


def _torch(request: InitRequest, folder: Path) -> _Subject:
    text, spans = os.fspath(request.source), dict[str, tuple[int, int, int]]()
    with opened(text, None, request.factory_arg) as source:
        notes = {"source": " ".join(note if note.endswith(".") else f"{note}." for note in source.notes)}
        if request.inputs:
            inputs, _ = stated_inputs(source, request.inputs)
        elif source.inputs:
            inputs = source.inputs
        else:
            held = _held(request.data)
            inputs, notes["inputs"] = _tried(source, held)
            spans = _spans(inputs, held)
        described = f"{text}, weights: {source.weights}"
        prepared = source.preprocess
    image = _image(inputs)
    if image is not None and prepared is None:
        if text.startswith("torchvision:"):
            prepared = {"preset": "imagenet", **_layout(image)}
            notes["preprocess"] = "As torchvision's published weights of this model take it."
        elif image.dtype == "uint8":
            prepared, notes["preprocess"] = _layout(image), _PIXELS
        else:
            prepared = {"scale": "1/255"} if image.shape[1] == 1 else {"preset": "imagenet"}
            prepared |= _layout(image)
            notes["preprocess"] = "A guess, no more: use what your training used; docs/preprocessing.md has the keys."
    module, _, factory = text.rpartition(":")
    if not text.startswith("torchvision:") and not module.endswith(".py") and Path(f"{module}.py").is_file():
        module += ".py"  # so that `pipeline` sees when it changes
    if module.endswith(".py"):
        module = _place(Path(module).resolve(), folder)
    takes = tuple(inputs)
    if len({info.shape[:1] for info in takes}) > 1:  # where samples lie is known of the exported model
        takes = tuple(replace(info, batch_axis=None) for info in takes)
    prepared = prepared if image is not None else None
    return _Subject(f"{module}:{factory}", described, takes, tuple(inputs), notes, prepared, spans=spans)


def _held(data: str | os.PathLike[str] | None) -> dict[str, TensorInfo]:
    """What the arrays of an .npz file are like, by name, where their first axis counts samples."""
    if data is None or Path(data).suffix != ".npz":
        return {}
    return {
        name: TensorInfo(name, _TAKEN_AS.get(array.dtype.name, array.dtype.name), ("batch", *array.shape[1:]))
        for name, array in stored_arrays(Path(data)).items()
        if array.ndim
    }


def _spans(inputs: Sequence[TensorInfo], held: Mapping[str, TensorInfo]) -> dict[str, tuple[int, int, int]]:
    """Least, best and most of sizes that were found open: up to the samples' own, and of a signal none that wasn't tried."""
    spans: dict[str, tuple[int, int, int]] = {}
    for info in inputs:
        for axis, size in enumerate(info.shape):
            if size not in ("sequence", "length"):
                continue
            least, own = 8 if size == "sequence" else LENGTH, held[info.name].shape[axis] if info.name in held else None
            if isinstance(own, int):
                spans[size] = (min(least, own), own, own)
            elif size == "length":
                spans.setdefault(size, (LENGTH, LENGTH, 4 * LENGTH))
    return spans


def _tried(source: Source, held: Mapping[str, TensorInfo]) -> tuple[tuple[TensorInfo, ...], str]:
    """Inputs that the module takes, found by calling it, and how they were.

    Args:
        held: what the samples are like: inputs that they fit are tried first, then their own sizes.
    """
    torch = require("torch", "torch", "looking at a module")
    takes = Arguments(source.module)
    names = takes.required or takes.ordered[:1] or ["input"]
    further = {MASK, *held}  # padded batches need a mask
    names = [*names, *(name for name in takes.names if name in further and name not in names)]
    places = []
    for name in names:
        likely = list(_candidates(torch, source.module, name))
        if (own := held.get(name)) is not None:
            likely = [*(info for info in likely if _fits(own, info)), own, *likely]
        places.append(list(dict.fromkeys(likely)))
    combinations: Iterator[tuple[TensorInfo, ...]] = itertools.product(*places)
    if held.keys() >= set(names):  # before the many that differ in one
        combinations = itertools.chain([next(combinations), tuple(held[name] for name in names)], combinations)
    training = source.module.training
    source.module.eval()
    try:
        for infos in itertools.islice(combinations, TRIES):
            if _runs(torch, source.module, infos, named=bool(takes.names)):
                shapes = ", ".join(f"{info.name} {list(info.shape)}" for info in infos)
                why = f"Found by calling the module: it takes {shapes}"
                if any(len(info.shape) == 4 and info.name not in held for info in infos):
                    why += "; another height and width may be what it was trained with"
                return tuple(infos), f"{why}."
    finally:
        source.module.train(training)
    typed = " ".join(f"`inputs='{name}:{example(name)}'`" for name in names)
    raise UsageError(
        f"{source.text}: its layers don't tell its inputs; forward takes: {takes}. Give their shapes, such as {typed}"
    )


def _fits(own: TensorInfo, info: TensorInfo) -> bool:
    """Whether arrays that are like `own` are such inputs."""
    sizes = zip(own.shape, info.shape)
    same = all(isinstance(size, str) or size == held for held, size in sizes)
    return own.dtype == info.dtype and len(own.shape) == len(info.shape) and same


def _candidates(torch: Any, module: Any, name: str) -> Iterator[TensorInfo]:
    """Inputs that the module's layers might read, those first that the argument's name speaks for."""
    tokens = TensorInfo(name, "int64", ("batch", "sequence"))
    candidates: dict[TensorInfo, None] = {}
    for layer in module.modules():
        shapes: list[tuple[int | str, ...]] = []
        if isinstance(layer, torch.nn.Embedding):
            candidates.setdefault(tokens)
        elif isinstance(layer, torch.nn.Conv2d):
            shapes = [("batch", layer.in_channels, size, size) for size in SIZES]
        elif isinstance(layer, torch.nn.Conv1d):
            shapes = [("batch", layer.in_channels, "length")]
        elif isinstance(layer, torch.nn.RNNBase):
            shapes = [("batch", "sequence", layer.input_size)]
        elif isinstance(layer, torch.nn.MultiheadAttention):
            shapes = [("batch", "sequence", layer.embed_dim)]
        elif isinstance(layer, torch.nn.Linear):
            shapes = [("batch", layer.in_features), ("batch", "sequence", layer.in_features)]
        for shape in shapes:
            candidates.setdefault(TensorInfo(name, "float32", shape))
    images = [info for info in candidates if len(info.shape) == 4]
    likely = [info for info in images if info.shape[1] in (1, 3)] if len(images) > len(SIZES) else images
    others = [info for info in candidates if info not in images and info != tokens]
    ordered = [*([tokens] if tokens in candidates else []), *likely, *others[:6]]
    if _TOKENS.search(name):
        ordered = [tokens, *(info for info in ordered if info != tokens)]
        ordered.append(TensorInfo(name, "float32", ("batch", "sequence")))
        ordered.append(TensorInfo(name, "bool", ("batch", "sequence")))
    yield from dict.fromkeys(ordered or [TensorInfo(name, "float32", ("batch", 3, 224, 224))])


def _runs(torch: Any, module: Any, infos: Sequence[TensorInfo], named: bool) -> bool:
    """Whether the module takes such inputs, two samples and more than one length, and gives something for each sample."""
    lengths = (
        (SEQUENCE, SEQUENCE + 5)
        if any(size in ("sequence", "length") for info in infos for size in info.shape)
        else (0,)
    )
    for length in lengths:
        sizes = {"batch": 2, "sequence": length, "length": LENGTH // SEQUENCE * length}
        random = np.random.default_rng(SEED)
        arrays = []
        for info in infos:
            shape = [sizes[size] if isinstance(size, str) else size for size in info.shape]
            if info.dtype == "float32":
                arrays.append(torch.from_numpy(random.standard_normal(shape).astype(np.float32)))
            else:
                arrays.append(torch.from_numpy(np.ones(shape, info.dtype)))
        try:
            with torch.no_grad(), quiet():
                by_name = named and len(arrays) > 1
                result = module(**dict(zip((info.name for info in infos), arrays))) if by_name else module(*arrays)
        except (Exception, SystemExit):  # whatever the user's code thinks of it
            return False
        tensors = [value for _, value in leaves(result) if isinstance(value, torch.Tensor)]
        if not tensors or any(not value.ndim or value.shape[0] != 2 for value in tensors):
            return False
    return True


# The file ----------------------------------------------------------------------------------------------------------------


def _written(subject: _Subject, request: InitRequest, folder: Path) -> tuple[str, tuple[str, ...]]:
    """The recipe as TOML, and what of it was guessed."""
    notes, image = dict(subject.notes), _image(subject.inputs)
    notes["precision"] = (
        "The model holds scales of its own, which are built as they are, without samples."
        if subject.scaled
        else "The fastest where the model stands it; fp16 needs no samples; fp8 and bf16 are there, too."
    )
    notes["min_agreement"] = " ".join(
        filter(
            None,
            (
                notes.get("min_agreement"),
                "Share of the samples with FP32's class, token or pixel; other outputs: 20 dB.",
            ),
        )
    )
    ranges = _ranges(subject.inputs, subject.spans)
    if ranges:
        tuned = "Ranges (least, best, most) are guesses: an engine is tuned for the middle and takes nothing beyond the ends."
        notes["inputs"] = f"{notes.get('inputs', '')} {tuned}".strip()
    lines = ["# Written by trtopt init: look through what is guessed. Every key: the head of trtopt/recipes/loader.py."]

    def put(key: str, line: str) -> None:
        lines.extend(_comment(notes.get(key, "")))
        lines.append(line)

    put("description", f"description = {_toml(subject.description)}")
    put("source", f"source = {_toml(subject.source)}")
    if request.factory_arg:
        put("options", f"options = {_toml(dict(request.factory_arg))}")
    if subject.preprocess is not None:
        prepared = subject.preprocess
        alone = isinstance(prepared, Mapping) and list(prepared) == ["preset"]
        put("preprocess", f"preprocess = {_toml(prepared['preset'] if alone else prepared)}")  # type: ignore[index]
    lines.extend(_comment(_samples_note(subject, image)))
    if request.images is not None or request.data is not None:
        key = "images" if request.images is not None else "data"
        lines.append(f"{key} = {_toml(_place(Path(getattr(request, key)).resolve(), folder))}")
    else:
        lines.append('# images = "photos"' if image is not None else '# data = "samples.npz"')
    put("precision", 'precision = "int8"')
    put("min_agreement", f"min_agreement = {MIN_AGREEMENT}")
    lines += ["", *_comment(notes.get("inputs", ""))]
    for number, info in enumerate(subject.inputs):
        lines += [""] * bool(number)
        lines += [f"[inputs.{_key(info.name)}]", f"shape = {_toml(list(info.shape))}"]
        if info.dtype != "float32":
            lines.append(f"dtype = {_toml(info.dtype)}")
        if info.name in ranges:
            lines.append(f"range = {_toml(str(ranges[info.name]))}")
    guesses = tuple(
        f"{key}: {notes[key]}" for key in ("inputs", "preprocess", "precision", "min_agreement") if notes.get(key)
    )
    return "\n".join(lines) + "\n", guesses


def _samples_note(subject: _Subject, image: TensorInfo | None) -> str:
    what = "compare" if subject.scaled else "calibrate"
    if image is not None:
        return f"To {what} on: a folder of images like those that the model will see, some hundred; beside this file."
    return f"To {what} on: real inputs, some hundred, as arrays of numpy.savez: {_arrays(subject)}; beside this file."


def _arrays(subject: _Subject) -> str:
    return ", ".join(f"{info.name} ({' × '.join(map(str, info.shape))}, {info.dtype})" for info in subject.inputs)


def _ranges(inputs: Sequence[TensorInfo], spans: Mapping[str, tuple[int, int, int]]) -> dict[str, ShapeRange]:
    """A range for each input with open sizes; a name has one range wherever it stands, from `spans` if it is there."""
    needing = [info for info in inputs if info.open_axes]
    lengths = all(size in ("batch", "sequence") for info in needing for size in info.shape if isinstance(size, str))
    known: dict[str, tuple[int, int, int]] = {"sequence": (8, 64, 256), "batch": (1, 8, 32)} if lengths else {}
    known |= spans
    ranges = {}
    for info in needing:
        places = []
        for axis, size in enumerate(info.shape):
            if isinstance(size, str):
                known.setdefault(size, default_range(info, axis, batch_alone(needing)))
            places.append(known[size] if isinstance(size, str) else (size, size, size))
        ranges[info.name] = ShapeRange(*zip(*places))
    return ranges


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in wrap(" ".join(text.split()), 100)]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return (
            f"{{ {', '.join(f'{_key(str(key))} = {_toml(item)}' for key, item in value.items())} }}" if value else "{}"
        )
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if not isinstance(value, str):
        raise UsageError(
            f"{value!r} can't be written into a recipe: TOML has texts, numbers, true, false and lists of these"
        )
    return json.dumps(value).replace("\x7f", "\\u007f")


def _commands(subject: _Subject, request: InitRequest, output: Path) -> tuple[str, ...]:
    base = ["trtopt", "pipeline", str(output), "-o", f"{output.stem}-out"]
    if subject.scaled or request.images is not None or request.data is not None:
        return (shlex.join(base),)
    samples = ["--images", "DIR"] if _image(subject.inputs) is not None else ["--data", "F.npz"]
    return shlex.join([*base, *samples]), shlex.join([*base, "--precision", "fp16"])
