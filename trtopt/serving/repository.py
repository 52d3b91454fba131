"""Model repositories of Triton Inference Server: `trtopt deploy triton`."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from trtopt.core.documents import Plain
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import existing_file, made_folder, opened_regular, sha256_file, whole, write_bytes
from trtopt.core.operators import plugins
from trtopt.core.options import taking
from trtopt.core.temporary import folder_in
from trtopt.core.values import Kind, choice, parse_seconds
from trtopt.engine.manifest import WITHOUT_GRAPH, Manifest, load_manifest, manifest_path
from trtopt.runtime.request import BACKENDS as RUNTIMES
from trtopt.serving.config import LABELS, model_config, text
from trtopt.serving.interface import Interface, find_batching, read_interface
from trtopt.serving.request import DeployRequest
from trtopt.trt.plans import plan_header

BACKENDS = ("tensorrt", "python")
CONFIG = "config.pbtxt"
MATRIX = "https://docs.nvidia.com/deeplearning/frameworks/support-matrix/index.html"
_MODEL = Path(__file__).with_name("triton_model.py")
_VERSION = re.compile("[0-9]{1,18}")  # as Triton's 64 bits hold it
_HEADER = 64  # bytes of a plan that are read for its header


@dataclass(frozen=True)
class DeployedModel:
    """One model of a repository.

    Attributes:
        path: its folder.
        version: the folder in it that has the engine, and what Triton calls it.
        changed: whether anything was written; False: all was there already.
        max_batch_size: 0: Triton forms no batches, because of `no_batches`.
        notes: what there is to know about it.
    """

    name: str
    path: Path
    engine: Path
    backend: str
    version: int
    changed: bool
    max_batch_size: int
    no_batches: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Deployment(Plain):
    """A model repository, and what `deploy_triton` did to it."""

    repo: Path
    models: tuple[DeployedModel, ...]


@taking(DeployRequest)
def deploy_triton(request: DeployRequest) -> Deployment:
    """Write a model repository for Triton Inference Server.

    A model's configuration comes from its manifest. Its plan lies in a folder with a number: a new one for a plan that changed;
    where nothing changed, nothing is written.

    Args:
        engines: a plan with its manifest beside it, or several.
        repo: the repository, where other models may lie already.
        name: of the model there, for one engine; None: each engine's file name.
        backend: "tensorrt": the plan itself, for NVIDIA's container of the same TensorRT; "python": `Session` around it, for
            any plan, TensorRT-RTX's too, on a server whose Python has trtopt.
        runtime: what runs it in the Python backend, as `Session(backend=…)`.
        instances, max_delay: copies on each GPU, and how long a request waits for others: "2ms", "500us", or seconds.
        trust_host_code, plugins, operators: as for `Session`; the files are copied.
        overwrite: replace a configuration that is there and says something else.

    Raises:
        UsageError: no such file, options that don't go together, a configuration that would be overwritten, or an engine that
            Triton can't serve in this way; the message says what can.
        EngineError, EngineMismatch: the manifest can't be read, or is another plan's.
        OutputError: the repository can't be written.
    """
    given = request.engines
    engines = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    if not engines:
        raise UsageError("there is no engine to serve: give one at least")
    choice(request.backend, BACKENDS, "`backend=`")
    choice(request.runtime, RUNTIMES, "`runtime=`")
    if request.name is not None and len(engines) > 1:
        raise UsageError(f"`name=` is for one engine; there are {len(engines)}: each takes its file's name")
    if request.backend == "tensorrt" and request.runtime != "auto":
        raise UsageError("`runtime=` is for `backend='python'`: Triton's TensorRT backend runs the plan alone")
    delay = parse_seconds(request.max_delay, "`max_delay=`")
    models = [_Model(existing_file(engine, "the engine"), request) for engine in engines]
    names = [model.name for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two engines would be the model {twice[0]!r}: deploy them one by one, with `name=`")
    for model in models:  # all that can be refused is, before the first is written
        model.prepare(delay)
        model.check(Path(request.repo))
    repo = made_folder(request.repo, "the repository", "give another `repo=`")
    return Deployment(repo, tuple(model.write(repo) for model in models))


class _Model:
    """One engine on its way into a repository."""

    def __init__(self, engine: Path, request: DeployRequest) -> None:
        self.engine, self.request, manifest = engine, request, load_manifest(engine)
        if manifest is None:
            raise UsageError(
                f"{engine} has no manifest beside it ({engine.name}.json), which says what it takes: build it with `trtopt "
                "build`; an ONNX file alone, and a plan of another tool, Triton serves by a configuration of your own"
            )
        name = request.name
        self.name = re.sub(r"[^\w.-]", "_", engine.stem).lstrip(".") if name is None else name
        if not re.fullmatch(r"\w[\w.-]{0,199}", self.name):
            raise UsageError(f"`name={name!r}` can't be a model's name: letters, digits, '_', '-' and '.' make one")
        self.notes: list[str] = []
        self.manifest: Manifest = manifest
        if request.require is not None:
            choice(request.require, ("certified",), "`require=`")
            manifest.check_certificate(engine)
        self.files: dict[str, Path] = {}  # of the version's folder
        self.beside: dict[str, bytes] = {}  # of the model's
        self.libraries: tuple[Path, ...] = ()

    def prepare(self, delay: float) -> None:
        request = self.request
        self.manifest.check_plan(self.engine)
        if request.runtime == "onnxruntime":
            if self.manifest.graph_file is None:
                raise UsageError(
                    f"`runtime='onnxruntime'` runs the graph that was kept beside {self.engine.name}; there is none in its "
                    "folder: build with `save_onnx=`"
                )
            existing_file(self.engine.parent / self.manifest.graph_file, "the graph kept at the build", WITHOUT_GRAPH)
        else:
            self.libraries = self.manifest.check_plugins(self.engine, plugins())
        interface = read_interface(self.engine, self.manifest, request.runtime)
        batching = find_batching(interface)
        labelled = self._labels(interface)
        parameters = self._as_plan() if request.backend == "tensorrt" else self._as_session()
        config = model_config(self.name, interface, batching, request, delay, labelled, parameters)
        if not batching.most and request.max_delay != DeployRequest.max_delay:
            self.notes.append("`max_delay=` has no effect: without batches no request waits for others")
        if not config["model_warmup"]:
            self.notes.append("no warm-up: it has sizes that no profile bounds")
        self.batching = batching
        self.beside[CONFIG] = text(config).encode()

    def _labels(self, interface: Interface) -> list[str]:
        """Outputs that score the manifest's classes, whose names become the labels."""
        classes, kinds = self.manifest.classes or (), self.manifest.output_kinds or {}
        labelled = [
            info.name
            for info in interface.outputs
            if classes and info.shape[-1:] == (len(classes),) and kinds.get(info.name, Kind.CLASSES) == Kind.CLASSES
        ]
        if labelled:  # a line a class
            self.beside[LABELS] = "".join(f"{' '.join(name.split())}\n" for name in classes).encode()
        return labelled

    # What the version's folder holds --------------------------------------------------------------------------------

    def _as_plan(self) -> dict[str, str]:
        with opened_regular(self.engine) as file:
            header = plan_header(file.read(_HEADER))
        if header is not None and header.product != "TensorRT":
            raise UsageError(
                f"{self.engine.name} is a plan of {header}, which Triton's TensorRT backend can't read: give `backend='python'`"
            )
        maker = header or "TensorRT"
        self.notes.append(
            f"the container with the very {maker} that made the plan reads it; NVIDIA lists them: {MATRIX}"
        )
        if self.manifest.origin.carries:
            self.notes.append(
                "the plan is version-compatible and carries a library for the host: tritonserver, of later versions too, reads "
                "it only where its TensorRT backend is configured with version-compatible=true"
            )
        if self.libraries:
            self.notes.append(
                "its plugins lie beside the plan: trtopt serve gives them to tritonserver, which takes them by "
                "--backend-config=tensorrt,plugins=LIB.so"
            )
        self.files = {"model.plan": self.engine, **{path.name: path for path in self.libraries}}
        return {}

    def _as_session(self) -> dict[str, str]:
        """The engine with what `Session` needs beside it, and the parameters for `triton_model.py`."""
        manifest = manifest_path(self.engine)
        self.files = {self.engine.name: self.engine, manifest.name: manifest}
        if self.request.runtime == "onnxruntime":
            name = str(self.manifest.graph_file)
            graph = self.engine.parent / name
            self.files[name] = graph
            from trtopt.graph.io import external_files  # not where engines are served

            for place, file in external_files(graph).items():
                self.files[(Path(name).parent / place).as_posix()] = file
        operators = [Path(item) for item in self.request.operators]
        self.files |= {path.name: path for path in (*self.libraries, *operators)}
        for name in (self.name, *self.files):  # its Python decodes paths as ASCII, whatever the locale
            if not name.isascii():
                raise UsageError(
                    f"Triton's Python backend can't open {name!r}: only ASCII characters do; rename the file, or give `name=`"
                )
        self.files["model.py"] = _MODEL
        parameters = {"engine": self.engine.name, "runtime": self.request.runtime}
        given = {"plugins": self.libraries, "operators": operators}
        parameters |= {what: os.pathsep.join(path.name for path in paths) for what, paths in given.items() if paths}
        return parameters | ({"trust_host_code": "true"} if self.request.trust_host_code else {})

    # Writing --------------------------------------------------------------------------------------------------------

    def check(self, repo: Path) -> None:
        """Raise UsageError where a file says something else than it would; its author may have meant it. What is there already
        isn't written."""
        for name, content in list(self.beside.items()):
            path = repo / self.name / name
            try:
                there = whole(path)
            except (FileNotFoundError, NotADirectoryError):  # of the second, what makes the folder says more
                continue
            except OSError as error:
                raise UsageError(
                    f"{path} is there and can't be read ({error.strerror or error}): move it away"
                ) from error
            if there == content:
                del self.beside[name]
                continue
            if self.request.overwrite:
                self.notes.append(f"{name} said something else, and was replaced")
                continue
            difference = _difference(there, content) if name == CONFIG else "its content differs"
            raise UsageError(
                f"{path} is there and says something else ({difference}); `overwrite=True` replaces it, `name=` "
                "deploys beside it"
            )

    def write(self, repo: Path) -> DeployedModel:
        folder = made_folder(repo / self.name, "the model's folder", "give another `name=`")
        versions = [int(item.name) for item in folder.iterdir() if _VERSION.fullmatch(item.name) and item.is_dir()]
        newest = max(versions, default=0)
        digests = {name: sha256_file(source) for name, source in self.files.items()}
        there = folder / str(newest)
        files = [path for path in there.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        changed = not newest or {path.relative_to(there).as_posix(): sha256_file(path) for path in files} != digests
        version = newest + changed
        if changed:
            self._write_version(folder, version)
        for name, content in self.beside.items():
            write_bytes(folder / name, content)
        return DeployedModel(
            name=self.name,
            path=folder,
            engine=self.engine,
            backend=self.request.backend,
            version=version,
            changed=changed or bool(self.beside),
            max_batch_size=self.batching.most,
            no_batches=self.batching.why,
            notes=tuple(self.notes),
        )

    def _write_version(self, folder: Path, version: int) -> None:
        """A folder that takes its number when it is whole. Copies, for a plan that is rewritten in place would be another."""
        try:
            with folder_in(folder, f".{version}.") as partial:
                for name, source in self.files.items():
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, partial / name)
                partial.chmod(0o755)
                partial.rename(folder / str(version))
        except OSError as error:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if nothing else is in it: Triton would take it for a model
            raise OutputError(
                f"can't write {folder / str(version)}: {error.strerror or error}; nothing was left behind",
                "give another `repo=`",
            ) from error


def _difference(there: bytes, new: bytes) -> str:
    before, after = (content.decode(errors="replace").splitlines() for content in (there, new))
    changes = difflib.unified_diff(before, after, lineterm="", n=0)
    lines = [line for line in changes if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "; ".join(lines[:6]) + ("; …" if len(lines) > 6 else "")
