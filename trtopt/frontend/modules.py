"""PyTorch modules to export: torchvision's, a factory's, a recipe's or the caller's; nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trtopt.core.errors import ModelError, UsageError, require
from trtopt.core.files import existing_file
from trtopt.core.foreign import essence, own_imports
from trtopt.core.library_output import importing, quiet
from trtopt.core.values import Profile, TensorInfo
from trtopt.core.words import first_of
from trtopt.frontend.factories import SEED, make, making
from trtopt.recipes.loader import Recipe, load_recipe

_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pt2", ".safetensors")
_TENSORFLOW = (".h5", ".keras", ".pb", ".tflite")
_USUAL = ("state_dict", "model_state_dict", "model")  # what training scripts call a state dict beside others
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Source:
    """A module ready to export, and what is known about it."""

    module: Any  # a torch.nn.Module
    text: str  # what messages call it
    weights: str  # a path, "random (seed 0)", "the factory's own" or "the module's own"
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[str, ...] = ()
    opset: int | None = None
    preprocess: str | Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    ranges: Profile = field(default_factory=dict)  # of its inputs' shapes, where a recipe has them


@contextlib.contextmanager
def opened(
    source: Any, weights: str | os.PathLike[str] | None, factory_arg: Mapping[str, Any] | None = None
) -> Iterator[Source]:
    """Find and make the module; while it is in use, modules beside the user's own can be imported. One at a time."""
    with importing, own_imports():
        yield _found(source, weights, factory_arg or {})


def open_source(source: Any, weights: str | os.PathLike[str] | None) -> Source:
    """Find and make the module, for use without imports of its own."""
    with opened(source, weights) as module:
        return module


def _found(source: Any, weights: str | os.PathLike[str] | None, arguments: Mapping[str, Any]) -> Source:
    if not isinstance(source, (str, os.PathLike)):
        if not hasattr(source, "state_dict"):
            raise UsageError(
                f"the source is a {type(source).__name__}; needed: a torch.nn.Module, or a name such as "
                "torchvision:resnet50"
            )
        if arguments:
            raise UsageError("factory arguments are for a factory's name; the source is a ready module")
        name = type(source).__name__
        return _weighted(Source(_without_end(source, name), name, "the module's own"), weights)
    text = os.fspath(source)
    if text.endswith(".onnx"):
        raise UsageError(f"{text} is an ONNX model already; use it as it is: trtopt check {text}")
    if text.endswith(_WEIGHTS):
        raise UsageError(_advice(Path(text)))
    if text.endswith(_TENSORFLOW):
        raise UsageError(
            f"{text} is no PyTorch model: of Keras' and TensorFlow's tf2onnx writes ONNX (python -m tf2onnx.convert); then "
            "trtopt check model.onnx"
        )
    if ":" in text and not text.endswith(".toml"):
        return _weighted(_made(text, (), arguments), weights)
    if (path := Path(text if text.endswith(".py") else f"{text}.py")).is_file():
        raise UsageError(
            f"{text} is a Python file: say which class or function of it gives the model, as in {path}:Net"
        )
    try:
        recipe = load_recipe(text)
    except UsageError as error:
        if text.endswith(".toml"):
            raise
        raise UsageError(
            f"{error}. A model of yours: FILE.py:FACTORY, a function of your file that returns it, from wherever it comes "
            "(such as from_pretrained of a local folder); torchvision's: torchvision:NAME"
        ) from None
    return _from_recipe(recipe, weights, arguments)


def _made(text: str, positional: Sequence[Any], arguments: Mapping[str, Any], folder: Path | None = None) -> Source:
    if text.startswith("torchvision:"):
        return _torchvision(text.partition(":")[2], arguments)
    return Source(_without_end(make(text, positional, arguments, folder), text), text, "the factory's own")


def _without_end(module: Any, text: str) -> Any:
    """Return the module, unless it is one of torchvision's detectors (a subclass may have a forward of its own, without NMS),
    or holds TorchScript."""
    script = require("torch", "torch", "export").jit.ScriptModule
    if isinstance(module, script) or any(isinstance(part, script) for part in module.modules()):
        raise UsageError(
            f"{text} holds TorchScript, which torch's exporter doesn't read: put the Python module there that it was made "
            "from; the weights: torch.save(scripted.state_dict(), 'state.pth'), then `weights='state.pth'`"
        )
    if str(getattr(type(module).forward, "__module__", "")).startswith("torchvision.models.detection."):
        raise UsageError(_without_nms(text, two_stages=not hasattr(module, "head")))
    return module


def _from_recipe(recipe: Recipe, weights: str | os.PathLike[str] | None, arguments: Mapping[str, Any]) -> Source:
    if recipe.onnx:
        raise UsageError(f"the recipe {recipe.name} is an ONNX model already: use {recipe.onnx}")
    recipe.check_installed()  # before torch is asked for, which is larger
    source = _made(recipe.source, recipe.arguments, {**recipe.options, **arguments}, recipe.path.parent)
    source = replace(
        source,
        text=f"{recipe.name} ({recipe.source})",
        inputs=recipe.inputs or source.inputs,
        outputs=recipe.outputs,
        opset=recipe.opset,
        preprocess=recipe.preprocess,
        ranges=recipe.ranges,
    )
    return _weighted(source, weights or recipe.weights)


def _torchvision(name: str, options: Mapping[str, Any]) -> Source:
    models = require("torchvision", "torch", "a torchvision model").models
    names, text = models.list_models(), f"torchvision:{name}"
    if name not in names:
        close = ", ".join(difflib.get_close_matches(name, names, 3)) or "see torchvision.models.list_models()"
        raise UsageError(f"torchvision has no model {name!r}; close: {close}")
    detects = name in models.list_models(models.detection)
    if detects and "rcnn" in name:
        raise UsageError(_without_nms(text, two_stages=True))
    if name in models.list_models(models.quantization):
        plain = name.removeprefix("quantized_")
        raise UsageError(
            f"{text} is made of PyTorch's own INT8 operators for CPUs, which ONNX lacks: export torchvision:{plain} and let "
            "trtopt build --int8 quantize it"
        )
    torch = require("torch", "torch", "export")
    builder = models.get_model_builder(name)
    # No weights of any kind: a backbone's default would be downloaded.
    nothing = {key: None for key in inspect.signature(builder).parameters if key.startswith("weights")}
    given = f"; given: {dict(options)}" if options else ""
    with (
        making(torch, text, lambda error: UsageError(f"{text}: {type(error).__name__}: {essence(error)}{given}")),
        quiet(),
    ):
        module = builder(**{**nothing, **options})
        trained = any(options.get(key) is not None for key in ("weights", "weights_backbone"))
        # Some classifiers start with a last layer of zeros (ViT): every output would be zero and agree with anything.
        linear = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear) and not trained]
        filled = [torch.nn.init.normal_(layer.weight, std=0.02) for layer in linear if not bool(layer.weight.any())]
    notes = [] if trained else [f"{name} has random weights (seed {SEED}): give weights to export a trained model"]
    if filled:
        notes.append(f"{len(filled)} layer(s) that {name} starts at zero were filled too, so that outputs differ")
    weights = "as its arguments say" if trained else f"random (seed {SEED})"
    preprocess: str | dict[str, Any] | None = None
    name_in, size = "input", (224, 224)
    if detects:
        preprocess = _preparation(module)
        size = (preprocess["size"][0], preprocess["size"][1])
        notes.append(
            f"{text} ends in NMS (non-maximum suppression), which torch's exporter can't follow: this is what comes before it, "
            f"raw box regressions and class scores of images prepared outside ({size[0]}×{size[1]}); docs/export.md has the "
            "rest"
        )
        module, name_in = _heads(torch, module), "images"
    else:
        with contextlib.suppress(Exception):  # only a hint: the size its published weights were made for
            preset = models.get_model_weights(name).DEFAULT.transforms()
            size = (int((getattr(preset, "crop_size", None) or preset.resize_size)[0]),) * 2
            preprocess = "imagenet" if size == (224, 224) else None
    single = name not in (*models.list_models(models.video), *models.list_models(models.optical_flow))
    inputs = (TensorInfo(name_in, "float32", ("batch", 3, *size)),) if single else ()
    return Source(module, text, weights, inputs, preprocess=preprocess if single else None, notes=tuple(notes))


def _heads(torch: Any, detector: Any) -> Any:
    """Return a module of what SSD, SSDlite, RetinaNet or FCOS compute between their own resizing and NMS."""

    class Heads(torch.nn.Module):  # type: ignore[misc]  # torch is imported where it is needed
        def __init__(self) -> None:
            super().__init__()
            self.model = detector

        def forward(self, images: Any) -> Any:
            features = self.model.backbone(images)
            return self.model.head([features] if isinstance(features, torch.Tensor) else list(features.values()))

    return Heads()


def _preparation(detector: Any) -> dict[str, Any]:
    """Return the keys of a `Preprocess` that does what the detector's transform does, to images of one size."""
    transform = detector.transform
    # Without a fixed size, the shorter side of any image; a network of one size takes it for both.
    width, height = transform.fixed_size or (transform.min_size[0],) * 2
    return {
        "resize": "letterbox" if transform.fixed_size is None else "stretch",
        "size": [int(height), int(width)],
        "scale": 1 / 255,
        "mean": list(map(float, transform.image_mean)),
        "std": list(map(float, transform.image_std)),
    }


def _without_nms(text: str, *, two_stages: bool) -> str:
    if two_stages:
        part = "of a two-stage detector, which has NMS between its stages, too, that is the backbone: model.backbone"
    else:
        part = "write a module whose forward returns model.head(list(model.backbone(images).values()))"
    return (
        f"{text} ends in NMS (non-maximum suppression): how many boxes it gives depends on the image, and torch's exporter "
        f"can't follow that. Export what comes before NMS, and do the rest after the engine: {part}. docs/export.md shows it"
    )


def _weighted(source: Source, weights: str | os.PathLike[str] | None) -> Source:
    """Load a state dict, strictly."""
    if weights is None:
        return source
    torch = require("torch", "torch", "export")

    def is_state(value: Any) -> bool:
        items = value.values() if isinstance(value, dict) else ()
        return bool(items) and all(isinstance(item, torch.Tensor) for item in items)

    path = existing_file(weights, "the weights file")
    if _is_script(path):  # before torch, which warns of it, too
        raise ModelError(
            f"the weights {path} are TorchScript: save them alone, in Python: torch.save(torch.jit.load({str(path)!r})"
            f".state_dict(), '{path.stem}.state.pth'); then: `weights='{path.stem}.state.pth'`"
        )
    tensors = path.suffix == ".safetensors" and require("safetensors.torch", "torch", "a .safetensors file")
    try:
        state = tensors.load_file(path) if tensors else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"the weights {path} can't be loaded safely (weights_only=True): {essence(error, 1)}; {_alone(path)}"
        ) from error
    notes = [note for note in source.notes if "random weights" not in note and "start" not in note]
    if not is_state(state):
        keys = list(map(str, state)) if isinstance(state, dict) else []
        inside = [key for key in keys if is_state(state.get(key))]
        inside.sort(key=lambda key: key not in _USUAL)
        if not inside or (len(inside) > 1 and inside[0] not in _USUAL):
            raise ModelError(
                f"the weights {path} hold {len(inside) or 'no'} state dicts ({first_of(inside or keys, 8)}): save the one that "
                f"is meant, in Python: torch.save(torch.load({str(path)!r})['KEY'], 'state.pth'), or "
                "torch.save(model.state_dict(), 'state.pth'); then: `weights='state.pth'`"
            )
        if len(inside) > 1:
            notes.append(f"of the state dicts in {path} {inside[0]!r} is taken, not {first_of(inside[1:])}")
        state = state[inside[0]]
    own = {_unwrapped(name): name for name in source.module.state_dict()}
    state = {_unwrapped(name): value for name, value in state.items()}
    if not own.keys() & state.keys():  # DataParallel's "module.", a wrapper's "model."
        state = {f"{_beginning(own)}{key.removeprefix(_beginning(state))}": value for key, value in state.items()}
    try:
        source.module.load_state_dict({own.get(name, name): value for name, value in state.items()})
    except RuntimeError as error:
        raise ModelError(
            f"the weights {path} don't fit {source.text}: {essence(error, 6)}. If the model was trained with other arguments, "
            "give them as `factory_arg={'NAME': 'VALUE'}`"
        ) from error
    return replace(source, weights=str(path), notes=tuple(notes))


def _alone(path: Path) -> str:
    """Return how the weights of a pickled model are saved alone; it isn't unpickled here, as that runs what the file brings."""
    return (
        "if it is a whole pickled model that you trust, save its weights alone, in Python where its class can be imported: "
        f"torch.save(torch.load({str(path)!r}, weights_only=False).state_dict(), '{path.stem}.state.pth')"
    )


def _advice(path: Path) -> str:
    """Return how a model comes out of a file of weights, or of what else has such a name."""
    if path.suffix == ".pt2" or _is_script(path):
        kind, end = ("export", "") if path.suffix == ".pt2" else ("jit", "()")
        what = "a program of torch.export" if kind == "export" else "TorchScript, which torch's exporter doesn't read"
        return (
            f"{path} is {what}: export the Python module that it was made from, trtopt export my_model.py:Net; its weights: "
            f"torch.save(torch.{kind}.load({str(path)!r}).state_dict{end}, 'state.pth')"
        )
    return (
        f"{path} holds weights, not a model: name the class or function that makes the model, and give the weights: trtopt "
        f"export my_model.py:Net --weights {path} (torchvision's: trtopt export torchvision:resnet50 --weights {path}); "
        f"{_alone(path)}; an Ultralytics model: yolo export model={path} format=onnx"
    )


def _is_script(path: Path) -> bool:
    """Return True if torch.jit wrote it."""
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        return any(name.endswith("constants.pkl") for name in archive.namelist())
    return False


def _unwrapped(name: str) -> str:
    """A parameter's name without what torch.compile and FSDP put into it, at any depth."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _beginning(names: Iterable[str]) -> str:
    """Return the common beginning of all names, up to a dot."""
    parts = os.path.commonprefix([name.split(".")[:-1] for name in names])  # noqa: RUF071  of lists: by whole parts
    return "".join(f"{part}." for part in parts)
