"""TensorRT's plugin registry: who is in it, the user's libraries that are loaded into it, and what a graph asks of it."""

from __future__ import annotations

import ctypes
import difflib
import os
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.core.documents import Plain
from trtopt.core.errors import UsageError
from trtopt.core.files import sha256_file
from trtopt.core.operators import PARSERS, known, run_file
from trtopt.core.values import Issue
from trtopt.core.words import first_of

if TYPE_CHECKING:  # running an engine needs no onnx
    from onnx import ModelProto

Key = tuple[str, str, str]  # of a creator: name, version, namespace


@dataclass(frozen=True)
class Creator(Plain):
    """A plugin that TensorRT can make.

    Attributes:
        fields: names of the attributes that it reads.
        library: the user's file that it came with; empty: TensorRT's own.
    """

    name: str
    version: str
    namespace: str
    fields: tuple[str, ...]
    library: str = ""


@dataclass(frozen=True)
class Library:
    """A plugin library or module that was loaded.

    Attributes:
        creators: name, version and namespace of those that came with it; none where the process had loaded it before.
    """

    path: Path
    sha256: str
    creators: tuple[Key, ...]


_INTERNAL = "MyelinWeightsTransformPlugin"  # of the parser
_lock = threading.Lock()
_loaded: dict[tuple[int, Path], Library] = {}  # by TensorRT's module and file


def load(module: Any, paths: Iterable[Path], product: str) -> tuple[Library, ...]:
    """Load plugin libraries into a TensorRT, each once in a process.

    Raises:
        UsageError: one can't be loaded, a Python module fails, or a file was changed after this process had loaded it.
    """
    libraries = []
    for path in paths:
        with _lock:
            found, digest = _loaded.get((id(module), path)), sha256_file(path)
            if found is not None and found.sha256 != digest:
                raise UsageError(f"{path} was changed after this process had loaded it: start again")
            if found is None:
                before, mapped = set(_listed(module)), _is_mapped(path)
                _open(module, path, product, before)
                gained = tuple(sorted(_listed(module).keys() - before))
                if not gained and not mapped and path.suffix != ".py":  # a module may be for another TensorRT
                    raise UsageError(
                        f"{path} adds no plugin: either it has none, or TensorRT has plugins of these names "
                        "already and keeps those; a process can't replace a plugin: start again"
                    )
                found = _loaded[id(module), path] = Library(path, digest, gained)
        libraries.append(found)
    return tuple(libraries)


def _open(module: Any, path: Path, product: str, before: set[Key]) -> None:
    if path.suffix == ".py":
        run_file(path)
        return
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # REGISTER_TENSORRT_PLUGIN registers as it is loaded
    except OSError as error:
        raise UsageError(
            f"the plugin library {path} can't be loaded into {product}: {error}; it has to be built for this TensorRT and "
            "machine (ldd shows what it lacks)"
        ) from None
    registry = module.get_plugin_registry()
    if hasattr(registry, "load_library") and _listed(module).keys() == before:
        registry.load_library(str(path))  # by its getCreators, which nothing has called yet


def _is_mapped(path: Path) -> bool:
    """Tell whether the process had loaded a library itself."""
    try:
        ctypes.CDLL(str(path), os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _listed(module: Any) -> dict[Key, Any]:
    """Return every creator in the registry of a TensorRT module."""
    registry = module.get_plugin_registry()
    found = registry.all_creators if hasattr(registry, "all_creators") else registry.plugin_creator_list
    return {(str(item.name), str(item.plugin_version), str(item.plugin_namespace)): item for item in found}


def registered(module: Any, libraries: Sequence[Library], names: Container[str] | None = None) -> tuple[Creator, ...]:
    """Return every plugin in the registry of a TensorRT module, with the library that it came with, and the fields of all or of
    those of some names: TensorRT prints an error where it is asked for those of a plugin that is its own business."""
    own = {key: str(library.path) for library in libraries for key in library.creators}
    found = list[Creator]()
    for key, item in _listed(module).items():
        if key[0] != _INTERNAL:
            fields = (item.field_names or ()) if names is None or key[0] in names else ()
            found.append(Creator(*key, tuple(str(field.name) for field in fields), own.get(key, "")))
    return tuple(found)


def problems(graph: ModelProto, creators: Sequence[Creator], *, gpu: bool) -> Iterator[Issue]:
    """Yield what custom operators of a graph ask for that no plugin here has: its name, version, namespace or attributes; all
    where there is no `gpu`."""
    from trtopt.graph.proto import attributes_of, custom_nodes

    for node in custom_nodes(graph):
        given = attributes_of(node)
        version, namespace = (str(given.get(name, default)) for name, default in zip(PARSERS, ("1", "")))
        named = [item for item in creators if item.name == node.op_type]
        same = [item for item in named if item.version == version and item.namespace == namespace]
        text = ""
        if not named:
            near = difflib.get_close_matches(node.op_type, {item.name for item in creators}, 1)
            text = f"TensorRT has no plugin of that name here{f'; near: {near[0]}' if near else ''}"
        elif not same:
            there = ", ".join(
                f"version {item.version}{f' of {item.namespace}' * bool(item.namespace)}" for item in named
            )
            asked = f"version {version}{f' of {namespace}' * bool(namespace)}"
            text = f"it asks for the plugin's {asked} (attributes plugin_version and plugin_namespace); here is {there}"
        elif unknown := sorted(given.keys() - {*same[0].fields, *PARSERS}):
            has = first_of(same[0].fields, 12) or "none"
            text = f"the plugin doesn't read the attribute {first_of(unknown)}; it reads {has}"
        elif (found := known(node.domain, node.op_type)) and (lacking := sorted(found.required() - given.keys())):
            text = f"it lacks {first_of(lacking, 12)}, which the plugin needs"
        if not gpu:
            without = "TensorRT-RTX adds a plugin's layer on a GPU alone (1.7.1 ends the process): build it where there is one"
            text = "; ".join(filter(None, [text, without]))
        if text:
            yield Issue(node.name, node.op_type, text)
