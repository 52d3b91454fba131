"""`init`: a recipe for the user's own model, with what is known of it and "?" for the rest; or a custom operator's project."""

from __future__ import annotations

import json
import keyword
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import defs

from trtopt.core.documents import Plain
from trtopt.core.errors import ModelError, UsageError
from trtopt.core.files import check_writable, whole, write_bytes
from trtopt.core.options import taking
from trtopt.core.shapes import batch_alone
from trtopt.core.values import MIN_AGREEMENT, TensorInfo, named_size
from trtopt.data.arrayfiles import stored_arrays
from trtopt.frontend.inputs import Arguments, stated_inputs
from trtopt.frontend.modules import opened
from trtopt.frontend.request import InitRequest
from trtopt.graph.io import load_model
from trtopt.graph.limits import OUTSIDE
from trtopt.graph.prepare import holds_scales
from trtopt.recipes.loader import UNKNOWN, known_recipes, load_recipe
from trtopt.trt.kernels import ADAPTERS

_COMMENTS = {
    "preprocess": 'As in training: "imagenet", "efficientnet-lite", "yolo", a .toml file or keys: docs/preprocessing.md.',
    "shape": 'Such as ["batch", 3, 224, 224]; a name makes a size open.',
    "range": 'Least, best and most, such as "1x8,8x64,32x256": an engine takes nothing beyond the ends.',
}
# A custom operator's project: templates, and the names of what is made of them, from the first one's.
_TEMPLATES = {"operator.py.in": "{}.py", "operator.cu.in": "{}.cu", "test_operator.py.in": "test_{}.py"}
_SCALED = "the model holds scales of its own, which are built as they are, without samples"


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
    """Write a recipe for a model: its inputs, how images are prepared, precision and accuracy limit.

    What neither the model nor an argument says is "?" in the file; nothing is run to find it.

    `init("operator", name="acme::Swishy")` writes a custom operator's project instead: the function as `output` (default:
    OPERATOR.py), its CUDA kernel and a test beside it.

    Args:
        source: an ONNX file, or what `export` takes; factory_arg, inputs: as there, not of an ONNX file.
        output: the recipe to write; default: NAME.toml in the current folder, NAME the model's.
        images, data: what to calibrate on, one of them; arrays also say what the inputs are.
        force: write over a recipe that is there.

    Raises:
        UsageError: a source that can't be right, samples that aren't there, or a recipe that is there already.
        MissingDependency, ModelError, InvalidModel, OutputError: as `export` and `check`.
    """
    text = os.fspath(request.source)
    if text == "operator" or request.name is not None:
        return _operator(request, text)
    output = _output(request, text)
    samples = {name: Path(value) for name in ("images", "data") if (value := getattr(request, name)) is not None}
    if lacking := next((name for name, path in samples.items() if not path.exists()), None):
        raise UsageError(f"`{lacking}='{samples[lacking]}'` doesn't exist")
    with request.reporter.phase("look at the model"):
        inputs, known, notes = _of_onnx(text) if text.endswith(".onnx") else _of_module(request)
    recipe = _sources(text, output, samples)
    if request.factory_arg:
        recipe["options"] = dict(request.factory_arg)
    image = len(inputs) == 1 and len(inputs[0].shape) == 4 and inputs[0].dtype != "uint8"
    if known is not None or (image and "data" not in samples and _SCALED not in notes):
        recipe["preprocess"] = UNKNOWN if known is None else known
    tables = {"": {"description": text, **recipe, "precision": "int8", "min_agreement": MIN_AGREEMENT}}
    for info in inputs:
        keys = {"shape": list(info.shape), "dtype": info.dtype, "range": UNKNOWN}
        if UNKNOWN in info.shape or batch_alone(inputs) or not info.open_axes:
            del keys["range"]  # of an open batch alone a build has one itself
        tables[f"inputs.{_toml(info.name)}"] = keys
    content, unknown = _content(tables)
    write_bytes(output, content.encode())
    if not unknown:
        load_recipe(output)
    command = ["trtopt", "pipeline", str(output), "-o", f"{output.stem}-out"]
    if not samples and _SCALED not in notes:
        command += ["--images", "DIR"] if "preprocess" in recipe else ["--data", "F.npz"]
    return InitResult(output, text, content, tuple(unknown), tuple(notes), (shlex.join(command),))


def _operator(request: InitRequest, text: str) -> InitResult:
    """Write a project for a custom operator: its Python file, and its kernel and its test beside it."""
    if text != "operator" or (name := request.name) is None:
        raise UsageError("an operator's project takes both words: trtopt init operator acme::Swishy")
    domain, _, op = name.rpartition("::")
    if not op.isidentifier() or keyword.iskeyword(op) or not domain.replace(".", "_").isidentifier():
        raise UsageError(f"the operator's name is {name!r}; write domain::Operator, such as acme::Swishy")
    if defs.has(op):
        raise UsageError(
            f"{op} is an operator of ONNX's own, which TensorRT's parser takes {name} for: give it another name"
        )
    first = Path(request.output or f"{op}.py")
    if first.suffix != ".py":
        raise UsageError(
            f"`output={os.fspath(first)!r}`: the function's file has to end in .py; its kernel and test are beside it"
        )
    files = {first.with_name(pattern.format(first.stem)): template for template, pattern in _TEMPLATES.items()}
    if there := next((path for path in files if path.exists() and not request.force), None):
        raise UsageError(f"{there} is there already: give another `output=`, or `force=True`")
    texts = dict[Path, str]()
    for path, template in files.items():
        text_of = whole(ADAPTERS / "project" / template).decode()
        for mark, word in (("@NAME@", name), ("@DOMAIN@", domain), ("@OP@", op), ("@FILE@", first.stem)):
            text_of = text_of.replace(mark, word)
        texts[path] = text_of
        write_bytes(path, text_of.encode())
    test = first.with_name(f"test_{first.name}")
    return InitResult(first, text, texts[first], (), (), (shlex.join(["pytest", str(test)]),))


def _output(request: InitRequest, text: str) -> Path:
    """Refuse what can't be right before anything is looked at; return the recipe to write."""
    onnx = text.endswith(".onnx")
    if text in known_recipes() or text.endswith(".toml"):
        raise UsageError(f"{text} is a recipe already: trtopt pipeline {text} … runs it")
    if onnx and (option := "inputs" if request.inputs else "factory_arg" if request.factory_arg else ""):
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
    return output


def _sources(text: str, output: Path, samples: Mapping[str, Path]) -> dict[str, Any]:
    """Return the keys that name files, by paths from the recipe's folder: the source, and what to calibrate on."""
    module, _, factory = (text, "", "") if text.endswith(".onnx") else text.rpartition(":")
    module += ".py" * Path(f"{module}.py").is_file()  # so that `pipeline` sees when it changes
    files = {"source": Path(module), **samples} if module.endswith((".onnx", ".py")) else samples
    beside = {name: os.path.relpath(os.path.realpath(path), output.resolve().parent) for name, path in files.items()}
    return {"source": f"{beside.pop('source', module)}:{factory}".rstrip(":"), **beside}


def _content(tables: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return a recipe as text, with comments over what isn't known, and the keys that aren't."""
    lines, unknown = [f"# Every key: python -m pydoc trtopt.recipes.loader. {UNKNOWN}: fill it in."], list[str]()
    for title, table in tables.items():
        lines += ["", f"[{title}]"] if title else []
        for key, value in table.items():
            if UNKNOWN in (value if isinstance(value, list) else [value]):
                unknown.append(f"{title}.{key}".lstrip(".").replace('"', ""))
                lines += [f"# {_COMMENTS[key]}"] if key in _COMMENTS else []
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n", unknown


def _of_onnx(text: str) -> tuple[list[TensorInfo], Any, list[str]]:
    """Return the inputs, their open sizes named; no preprocessing; and notes."""
    model = load_model(text, lazy=True)
    if odd := next((info for info in model.inputs if not info.numeric), None):
        raise ModelError(f"{text}: the input {odd.name} is of type {odd.dtype}, which TensorRT hasn't; {OUTSIDE}")
    inputs = []
    for info in model.inputs:
        names = ["batch", *(re.sub(r"\W", "_", f"{info.name}_{axis}") for axis in range(1, len(info.shape)))]
        unnamed = [axis in info.open_axes and not named_size(size) for axis, size in enumerate(info.shape)]
        shape = tuple(name if lacks else size for size, name, lacks in zip(info.shape, names, unnamed))
        inputs += [TensorInfo(info.name, info.dtype, shape)] if shape else []  # a number has no range
    return inputs, None, [_SCALED] if holds_scales(model) else []


def _of_module(request: InitRequest) -> tuple[list[TensorInfo], Any, list[str]]:
    """Return the inputs as they are stated or known, else as the arrays of `data`, "?" for the rest."""
    with opened(os.fspath(request.source), None, request.factory_arg) as source:
        inputs = list(stated_inputs(source, request.inputs)[0]) if request.inputs else list(source.inputs)
        takes = Arguments(source.module)
    held = {} if inputs or Path(request.data or "").suffix != ".npz" else stored_arrays(Path(request.data or ""))
    names = takes.required or takes.ordered[:1] or ["input"]
    for name in () if inputs else dict.fromkeys([*names, *(name for name in takes.names if name in held)]):
        if name in held:
            kind = {"f": "float32", "i": "int64"}.get(held[name].dtype.kind, held[name].dtype.name)
            inputs.append(TensorInfo(name, kind, ("batch", *held[name].shape[1:])))
        else:
            inputs.append(TensorInfo(name, UNKNOWN, (UNKNOWN,)))
    return inputs, source.preprocess, list(source.notes)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(str(key))} = {_toml(item)}' for key, item in value.items())} }}"
    if not isinstance(value, (str, bool, int, float, list, tuple)):
        raise UsageError(f"{value!r} can't be written into a recipe: TOML has text, numbers, true, false and lists")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
