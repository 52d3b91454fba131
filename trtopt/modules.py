"""PyTorch modules to export: torchvision's, a factory's, a recipe's or the caller's; nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtopt.errors import MissingDependency, ModelError, TrtoptError, UsageError, require
from trtopt.files import existing_file
from trtopt.recipes import Recipe, load_recipe
from trtopt.spec import TensorInfo

SEED = 0


@dataclass(frozen=True)
class Source:
    """A module ready to export, and what is known about it.

    Attributes:
        module: a torch.nn.Module.
        text: what messages call it.
        weights: a path, "random (seed 0)", "the factory's own" or "the module's own".
        notes: what the user should know.
    """

    module: Any
    text: str
    weights: str
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[str, ...] = ()
    opset: int | None = None
    preprocess: str | None = None
    notes: tuple[str, ...] = ()


def open_source(source: Any, weights: str | os.PathLike[str] | None) -> Source:
    """Find and make the module."""
    if not isinstance(source, (str, os.PathLike)):
        if not hasattr(source, "state_dict"):
            raise UsageError(
                f"the source is a {type(source).__name__}; needed: a torch.nn.Module, or a name such as "
                "torchvision:resnet50"
            )
        own = Source(source, type(source).__name__, "the module's own")
        return _weighted(own, weights)
    text = os.fspath(source)
    if text.endswith(".onnx"):
        raise UsageError(f"{text} is an ONNX model already; use it as it is: trtopt check {text}")
    if text.endswith((".pt", ".pth", ".safetensors")):
        raise UsageError(
            f"{text} holds weights, not a model: name the model and give the weights, as in "
            f"trtopt export torchvision:resnet50 --weights {text}"
        )
    kind, colon, name = text.partition(":")
    if kind == "torchvision" and colon:
        return _weighted(_torchvision(name), weights)
    if colon and not text.endswith(".toml"):
        return _weighted(Source(_make(text, (), {}), text, "the factory's own"), weights)
    return _from_recipe(load_recipe(text), weights)


def _from_recipe(recipe: Recipe, weights: str | os.PathLike[str] | None) -> Source:
    if recipe.onnx:
        raise UsageError(f"the recipe {recipe.name} is an ONNX model already: use {recipe.onnx}")
    kind, _, name = recipe.source.partition(":")
    if kind == "torchvision":
        found = _torchvision(name, recipe.options)
    else:
        recipe.check_installed()  # before torch is asked for, which is larger
        found = Source(_make(recipe.source, recipe.arguments, recipe.options), recipe.source, "the factory's own")
    found = replace(
        found,
        text=f"{recipe.name} ({recipe.source})",
        inputs=recipe.inputs or found.inputs,
        outputs=recipe.outputs,
        opset=recipe.opset,
        preprocess=recipe.preprocess,
    )
    return _weighted(found, weights or recipe.weights)


def _torchvision(name: str, options: Mapping[str, Any] | None = None) -> Source:
    require("torchvision", "torch", "a torchvision model")
    from torchvision import models

    known = models.list_models()
    if name not in known:
        close = ", ".join(difflib.get_close_matches(name, known, 3)) or "see torchvision.models.list_models()"
        raise UsageError(f"torchvision has no model {name!r}; close: {close}")
    torch = require("torch", "torch", "export")

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        # No weights of any kind: a backbone's default would be downloaded.
        extra = {"weights_backbone": None} if name in models.list_models(models.detection, include="*") else {}
        module = models.get_model(name, weights=None, **extra, **(options or {}))
        filled = _fill_zero_heads(torch, module)
    size, preprocess = 224, None
    with contextlib.suppress(Exception):  # only a hint: the size its published weights were made for
        preset = models.get_model_weights(name).DEFAULT.transforms()
        size = int(preset.crop_size[0])
        preprocess = "imagenet" if size == 224 else None
    notes = [f"{name} has random weights (seed {SEED}): give weights to export a trained model"]
    if filled:
        notes.append(f"{filled} layer(s) that {name} starts at zero were filled too, so that outputs differ")
    info = TensorInfo("input", "float32", ("batch", 3, size, size))
    return Source(
        module, f"torchvision:{name}", f"random (seed {SEED})", (info,), preprocess=preprocess, notes=tuple(notes)
    )


def _fill_zero_heads(torch: Any, module: Any) -> int:
    """Some classifiers start with a last layer of zeros (ViT): every output would be zero and agree with anything."""
    filled = 0
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear) and not bool(layer.weight.any()):
            torch.nn.init.normal_(layer.weight, std=0.02)
            filled += 1
    return filled


def _make(text: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    module_name, _, attribute = text.partition(":")
    torch = require("torch", "torch", "export")

    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            found: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
            made = found if isinstance(found, torch.nn.Module) else found(*arguments, **options)
    except ModuleNotFoundError as error:
        said = f"{text}: the module {error.name} isn't installed or isn't on the path"
        named = f"{module_name}.".startswith(f"{error.name}.")  # else it is what the named one imports
        raise (UsageError if named else MissingDependency)(said) from error
    except AttributeError as error:
        raise UsageError(
            f"{text}: {error}; write package.module:factory, something that gives a torch.nn.Module"
        ) from error
    except TrtoptError:
        raise
    except Exception as error:
        raise ModelError(f"{text} failed: {type(error).__name__}: {essence(error)}") from error
    if not isinstance(made, torch.nn.Module):
        raise UsageError(f"{text} gave a {type(made).__name__}; a torch.nn.Module is needed")
    return made


def _weighted(found: Source, weights: str | os.PathLike[str] | None) -> Source:
    """Load a state dict, strictly."""
    if weights is None:
        return found
    torch = require("torch", "torch", "export")

    path = existing_file(weights, "the weights file")
    try:
        if path.suffix == ".safetensors":
            state = require("safetensors.torch", "torch", "a .safetensors file").load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except TrtoptError:
        raise
    except Exception as error:
        raise ModelError(
            f"the weights {path} can't be loaded safely (weights_only=True): {essence(error)}; "
            "save the state dict alone: torch.save(model.state_dict(), path)"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ModelError(f"the weights {path} hold no state dict; save one: torch.save(model.state_dict(), path)")
    state = {key.removeprefix("module."): value for key, value in state.items()}  # DataParallel's prefix
    try:
        found.module.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(f"the weights {path} don't fit {found.text}: {essence(error, 6)}") from error
    notes = tuple(note for note in found.notes if "random weights" not in note and "start" not in note)
    return replace(found, weights=str(path), notes=notes)


def essence(error: BaseException, lines: int = 3) -> str:
    """The root cause's first lines, without dumps of the graph."""
    while error.__cause__ is not None:
        error = error.__cause__
    kept = [line.strip() for line in str(error).splitlines() if line.strip()][:lines]
    return " ".join(kept)[:600] or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Capture what libraries print, warn and log while they work."""
    caught = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(caught), contextlib.redirect_stderr(caught):
            warnings.simplefilter("ignore")
            yield caught
    finally:
        logging.disable(level)
