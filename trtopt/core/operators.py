"""Custom operators: what trtopt is told of operators that ONNX hasn't, and the user's own files that tell it.

A reference is a Python function that computes what the operator does; ONNX Runtime runs the rest of the graph. A plugin is
TensorRT's implementation, in a library or a Python module. Both are code: only files that the user names are loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import marshal
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file, sha256_file
from trtopt.core.foreign import essence, is_installed, module_of_file, own_imports, place
from trtopt.core.library_output import importing

PLUGINS = "TRTOPT_PLUGINS"  # variable of the environment: libraries and modules, as PATH has folders
PARSERS = ("plugin_version", "plugin_namespace")  # attributes that TensorRT's parser reads, and the operator doesn't
# Those with a reference here.
NVIDIAS = ("EfficientNMS_TRT", "MultiscaleDeformableAttnPlugin_TRT", "GroupNormalizationPlugin")
TYPES = ("fp32", "fp16", "bf16")
OUTPUTS = ("", "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool")
Shape = tuple["int | str", ...]


@dataclass(frozen=True)
class Operator:
    """A custom operator. The fields are those of `operator`.

    Attributes:
        source: SHA-256 of what its reference is made of.
    """

    name: str
    reference: Callable[..., Any]
    shapes: Callable[..., Sequence[Shape]] | None = None
    outputs: tuple[str, ...] = ()
    types: tuple[str, ...] = ("fp32",)
    fp32_inputs: tuple[int, ...] = ()
    source: str = ""
    kernel: Path | None = None

    def __call__(self, arrays: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the results for inputs (None where one is left out). UsageError where the reference fails."""
        with _told(f"the reference of {self.name} failed on {_sizes(arrays)}"):
            results = _several(self.reference(*arrays, **_own(attributes)))
        given = [item.shape for item in arrays if item is not None]
        said = self.shapes_of(given, attributes) if len(given) == len(arrays) else ()
        for result, shape in zip(results, said):
            found = getattr(result, "shape", ())
            same = (size == real or not isinstance(size, int) for size, real in zip(shape, found))
            if len(found) != len(shape) or not all(same):
                what = f"a result of {found}" if hasattr(result, "shape") else f"{type(result).__name__}, no array,"
                wanted = f"where its rule for shapes says {tuple(shape)}"
                raise UsageError(f"the reference of {self.name} gives {what} {wanted}")
        return results

    def shapes_of(self, shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
        """Return the results' shapes for those of the inputs; none where one is absent. UsageError where the rule fails."""
        if self.shapes is None or self.required() - attributes.keys():
            return ()
        with _told(f"the rule for shapes of {self.name} failed on {_sizes(shapes)}"):
            return tuple(map(tuple, self.shapes(*shapes, **_own(attributes))))

    def required(self) -> set[str]:
        given = inspect.signature(self.reference).parameters.values()
        return {item.name for item in given if item.kind is item.KEYWORD_ONLY and item.default is item.empty}


@contextlib.contextmanager
def _told(failed: str) -> Iterator[None]:
    """Raise UsageError, with the place, for whatever the user's own code raises."""
    try:
        yield
    except (Exception, SystemExit) as error:
        where = f" ({location})" if (location := place(error)) else ""
        raise UsageError(f"{failed}: {type(error).__name__}: {essence(error)}{where}") from error


def _sizes(inputs: Iterable[Any]) -> str:
    return ", ".join(str(getattr(item, "shape", item)) for item in inputs)


def _own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that are the operator's."""
    return {name: value for name, value in attributes.items() if name not in PARSERS}


def _several(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


_DATA = (int, float, str, bytes, list, tuple, dict)
_PRIMES = (1009, 2003, 1013, 2011, 1019, 2017, 1021, 2027, 1031, 2029, 1033, 2039, 1039, 2053, 1049, 2063)  # of sizes
_lock = threading.RLock()
_operators: dict[tuple[str, str], Operator] = {}
_references: dict[Path, str] = {}  # file → its SHA-256 when it was loaded
_plugins: dict[Path, None] = {}


def operator(
    name: str,
    *,
    shapes: Callable[..., Sequence[Shape]] | None = None,
    outputs: Iterable[str] = (),
    types: Iterable[str] = ("fp32",),
    fp32_inputs: Iterable[int] = (),
    kernel: str | os.PathLike[str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the reference of a custom operator, for this process.

    It takes the inputs as NumPy arrays (None: left out) and the attributes as keywords, and gives one array or a tuple.

        @trtopt.operator("my.ops::Swish", shapes=lambda x, beta: [x])
        def swish(x, beta, *, scale=1.0):
            return scale * x / (1 + np.exp(-beta * x))

    Args:
        name: "domain::Operator", as the model has it, or "Operator" alone: of any domain.
        shapes: the results' shapes for the inputs' (sizes are numbers, or texts where they are open) and the attributes; not
            needed where the model says them.
        outputs: the results' types by NumPy's names, such as "int64"; "", and by default: that of the first floating input.
        types: what its plugin takes and gives, all floats together, of "fp32", "fp16" and "bf16"; the rest of the graph is
            converted in front of it and behind.
        fp32_inputs: numbers of the inputs that stay in FP32.
        kernel: a CUDA file, beside the function's, of which a build compiles the plugin (`trtopt init operator` writes one).
            Arguments behind the `*` are its attributes, with defaults: numbers, or lists of them.

    Raises:
        UsageError: the name or a type can't be right.
    """
    if not isinstance(name, str):
        raise UsageError("@trtopt.operator takes the operator's name, such as @trtopt.operator('acme::Swish')")
    key, known_types, given = _key(name), _each(types), _each(outputs)
    for what, said, allowed in (("types", known_types, TYPES), ("outputs", given, OUTPUTS)):
        if (wrong := next((item for item in said if item not in allowed), None)) is not None:
            raise UsageError(
                f"the operator {name!r} has {wrong!r} among its {what}; allowed: {', '.join(filter(None, allowed))}"
            )

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        beside = Path(function.__code__.co_filename).parent if kernel is not None else Path()
        file = None if kernel is None else existing_file(beside / kernel, f"the kernel of {name}").resolve()
        source = _source(function, shapes)
        found = Operator(name, function, shapes, given, known_types, tuple(fp32_inputs), source, file)
        with _lock:
            _operators[key] = found
        return function

    return register


def known(domain: str, op: str) -> Operator | None:
    """Return what is known of an operator: registered for its domain or any, a plugin of TensorRT's own, or PyTorch's that is
    loaded here."""
    if (found := _operators.get((domain, op)) or _operators.get(("", op))) is not None:
        return found
    if op in NVIDIAS:
        from trtopt.core import nvidia_plugins  # needs NumPy, and this

        return nvidia_plugins.OPERATORS[op]
    torch = sys.modules.get("torch")
    if torch is None or not (domain.isidentifier() and op.isidentifier()) or domain in ("aten", "prim"):
        return None
    overload = getattr(getattr(getattr(torch.ops, domain), op, None), "default", None)
    return None if overload is None else _of_torch(torch, f"{domain}::{op}", overload)


def with_kernels(names: Iterable[str]) -> list[Operator]:
    """Return the registered operators of these names, without domains, that have a kernel."""
    return [item for item in registered() if item.kernel is not None and item.name.rpartition("::")[2] in names]


def digest(operators: Iterable[Operator]) -> str:
    """Return SHA-256 of what references are made of, for keys of what depends on them; empty: there are none."""
    sources = sorted({f"{item.name}\0{item.source}" for item in operators})
    return hashlib.sha256("\n".join(sources).encode()).hexdigest() if sources else ""


def registered() -> list[Operator]:
    with _lock:
        return list(_operators.values())


def plugins() -> tuple[Path, ...]:
    """Return the plugin libraries and modules that the user named, in that order; those of the environment are first."""
    named = filter(None, os.environ.get(PLUGINS, "").split(os.pathsep))
    those = [existing_file(item, f"the plugin of ${PLUGINS}").resolve() for item in named]
    return tuple(dict.fromkeys([*those, *_plugins]))


def files() -> tuple[Path, ...]:
    """Return every file that was named or that an operator names: plugins, references and kernels."""
    kernels = (item.kernel for item in registered() if item.kernel is not None)
    return tuple(dict.fromkeys([*plugins(), *_references, *kernels]))


def load(request: Any) -> None:
    """Load the references that a request names, and note its plugins for TensorRT. UsageError where a file isn't there, or
    fails."""
    for item in _each(getattr(request, "operators", ())):
        load_reference(item)
    for item in _each(getattr(request, "plugins", ())):
        add_plugin(existing_file(item, "the plugin").resolve())


def _each(given: Any) -> tuple[Any, ...]:
    """Return what an argument names, one or several; nothing of a switch, as `trtopt version` has by the name of plugins."""
    return (given,) if isinstance(given, (str, os.PathLike)) else () if isinstance(given, bool) else tuple(given)


def add_plugin(path: Path) -> None:
    """Note a plugin library, which TensorRT loads when it is next used."""
    with _lock:
        _plugins.setdefault(path)


def load_reference(path: str | os.PathLike[str]) -> None:
    """Run a Python file that registers references, once as long as it doesn't change."""
    path = existing_file(path, "the reference").resolve()
    with _lock:
        if _references.get(path) != (content := sha256_file(path)):
            _references[path] = content  # before: what it registers depends on it
            try:
                run_file(path)
            except BaseException:
                del _references[path]
                raise


def run_file(path: Path) -> None:
    """Import a Python file of the user's own, with its siblings; UsageError says where it failed."""
    if path.suffix != ".py":
        raise UsageError(f"{path} isn't a Python file: its name has to end in .py")
    with _told(f"{path} can't be imported"), importing, own_imports():
        module_of_file(path)


def _key(name: str) -> tuple[str, str]:
    domain, separator, op = name.rpartition("::")
    if not op or (separator and not domain):
        raise UsageError(f"the operator's name is {name!r}; write 'domain::Operator', or 'Operator' for any domain")
    return domain, op


def _source(*functions: Callable[..., Any] | None) -> str:
    """Return SHA-256 of functions' code, of the files that were loaded as references, which they may call, of what lies beside
    these and was imported, and of the numbers and texts that the code reads."""
    content, held, files = b"", [*_references.values()], dict[Path, None]()
    for item in functions:
        if (code := getattr(item, "__code__", None)) is not None:
            names = item.__globals__  # type: ignore[union-attr]
            content += marshal.dumps(code, 2)  # 2: the last version that is the same each time
            held += [_digest(names[name]) for name in code.co_names if name in names]
            _beside(names, Path(code.co_filename).parent, files)
    held += [sha256_file(path) for path in files]
    return hashlib.sha256(content + "\n".join(held).encode()).hexdigest()


def _digest(value: Any) -> str:
    """Return SHA-256 of numbers and texts, in arrays and lists, too; nothing of what isn't such."""
    if isinstance(value, _DATA) or type(value).__module__ == "numpy":
        with contextlib.suppress(Exception):  # a list may hold what can't be written
            return hashlib.sha256(pickle.dumps(value)).hexdigest()
    return ""


def _beside(names: Mapping[str, Any], folder: Path, found: dict[Path, None]) -> None:
    """Add the files in a folder that modules, or functions and classes of modules, come from, and those that these import."""
    for value in list(names.values()):
        module = value if inspect.ismodule(value) else sys.modules.get(getattr(value, "__module__", None) or "")
        file = Path(getattr(module, "__file__", None) or "")
        beside = folder in file.parents and file.suffix == ".py" and not is_installed(str(file))
        if module is not None and beside and file not in found:
            found[file] = None
            _beside(vars(module), folder, found)


@functools.lru_cache(maxsize=256)
def _of_torch(torch: Any, name: str, overload: Any) -> Operator:
    """A PyTorch custom operator as its own reference: its eager code on the CPU."""
    arguments = overload._schema.arguments

    def call(tensors: Iterable[Any], attributes: Mapping[str, Any]) -> tuple[Any, ...]:
        tensors, given = iter(tensors), list[Any]()
        for item in arguments:
            is_tensor = str(item.type) in ("Tensor", "Optional[Tensor]")
            given.append(next(tensors, None) if is_tensor else attributes.get(item.name, item.default_value))
        with torch.no_grad():
            return _several(overload(*given))

    def reference(*arrays: Any, **attributes: Any) -> Any:
        tensors = (None if array is None else torch.tensor(array) for array in arrays)
        return tuple(item.numpy() for item in call(tensors, attributes))

    def shapes(*given: Shape, **attributes: Any) -> list[Shape]:
        """By the operator's fake kernel: open sizes are primes there, and what differs for other primes isn't known."""
        symbols, found = list(dict.fromkeys(size for shape in given for size in shape if isinstance(size, str))), []
        for primes in (_PRIMES[::2], _PRIMES[1::2]):
            number = dict[int | str, int](zip(symbols, primes))
            metas = (torch.empty([number.get(size, size) for size in shape], device="meta") for shape in given)
            back = {value: key for key, value in number.items()}
            try:
                results = call(metas, attributes)
            except Exception:  # it has no fake kernel, or one for other types
                return []
            found.append([[back.get(size, size) for size in item.shape] for item in results])
        return [tuple(a if a == b else "" for a, b in zip(*pair)) for pair in zip(*found)]

    return Operator(name, reference, shapes, source=_source())
