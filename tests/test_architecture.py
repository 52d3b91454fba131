"""The house rules that keep it readable: imports run downward, and foreign libraries stay in their rooms."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import trtopt
from trtopt.core.values import SETTINGS

ROOT = Path(trtopt.__file__).parent
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}
# Folders in the order of imports: a module may import from its own room and from those before it.
ROOMS = (
    "core", "recipes", "data", "graph", "ort", "cuda", "trt", "linting", "calibration", "frontend", "engine", "builder",
    "runtime", "evaluation", "certification", "serving", "diagnosis", "autotune", "jobs", "workflow", "cli",
)  # fmt: skip
OWNERS = {  # foreign library → the only places that import it
    "tensorrt": ("trt",),
    "tensorrt_rtx": ("trt",),
    "tensorrt_lean": ("trt",),
    "tensorrt_lean_bindings": ("trt",),
    "cuda": ("cuda",),
    "torch": ("frontend", "evaluation.baselines"),
    "torchvision": ("frontend",),
    "cv2": ("data",),
    "PIL": ("data",),
    "onnxruntime": ("ort",),
    "ray": ("jobs.cluster",),
    "jinja2": ("diagnosis.report",),
    "pynvml": ("cuda",),
    "triton_python_backend_utils": ("serving.triton_model",),
}
HEAVY = {*OWNERS, "onnxscript"} - {"PIL", "triton_python_backend_utils"}


def _imports(tree: ast.Module, *, only_at_import: bool = False) -> Iterator[str]:
    """Names of imported modules, those for type checking left out."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef) if only_at_import else ()
    ignored = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, functions) or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test))
        for inner in ast.walk(outer)
    }
    for item in ast.walk(tree):
        if item in ignored:
            continue
        if isinstance(item, ast.Call) and not only_at_import and isinstance(item.func, (ast.Name, ast.Attribute)):
            called = item.func.id if isinstance(item.func, ast.Name) else item.func.attr
            if called in ("require", "import_module") and item.args and isinstance(item.args[0], ast.Constant):
                yield str(item.args[0].value)
        if isinstance(item, ast.Import):
            yield from (alias.name for alias in item.names)
        elif isinstance(item, ast.ImportFrom) and item.module and item.level == 0:
            yield item.module
            if item.module == "trtopt":
                yield from (f"trtopt.{alias.name}" for alias in item.names)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("__init__", "__main__")])
def test_imports_run_downward(module: str) -> None:
    own = ROOMS.index(module.partition(".")[0])
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    ours = [name.removeprefix("trtopt.") for name in _imports(tree) if name.startswith("trtopt.")]
    assert [name for name in ours if ROOMS.index(name.partition(".")[0]) > own] == []


def test_the_top_is_the_pipeline() -> None:
    top = {name.partition(".")[0] for name in MODULES} - {"__init__", "__main__"}
    assert top == set(ROOMS)
    assert {name for name in MODULES if "." not in name} == {"__init__", "__main__", "workflow"}
    assert len(ROOMS) <= 22


@pytest.mark.parametrize("module", MODULES)
def test_foreign_libraries_stay_in_their_rooms_and_come_when_they_are_used(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert [name for name in _imports(tree, only_at_import=True) if name.partition(".")[0] in HEAVY] == []
    for name in _imports(tree):
        top = name.partition(".")[0]
        rooms = OWNERS.get(top)
        assert rooms is None or any(module == room or module.startswith(f"{room}.") for room in rooms), name


OPENERS = {"opener", "os", "client", "archive", "pillow", "tarfile"}  # whose `open` takes no path of a file to read
READ_BY_THEMSELVES = {"__init__", "core.files"}  # the first reads its own stub


@pytest.mark.parametrize("module", sorted(set(MODULES) - READ_BY_THEMSELVES))
def test_files_are_read_through_one_module(module: str) -> None:
    """`core.files` reads regular files alone, within a limit: a FIFO is waited for, a device never ends."""
    for call in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        attribute = isinstance(call.func, ast.Attribute)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        assert name not in ("read_bytes", "read_text"), f"line {call.lineno}: trtopt.core.files.whole reads"
        if name == "open" and getattr(owner, "id", getattr(owner, "attr", "")) not in OPENERS:
            mode = [item.value for item in call.args[not attribute :] if isinstance(item, ast.Constant)]
            assert set("wax+") & set(str(mode)), f"line {call.lineno}: trtopt.core.files.opened_regular opens"


def test_no_module_shadows_a_public_function() -> None:
    assert set(trtopt.__all__) & {name.partition(".")[0] for name in MODULES} == set()
    assert all(callable(getattr(trtopt, name)) or name.startswith("__") for name in trtopt.__all__)


REQUESTS = [name for name in MODULES if name.endswith(".request")]


@pytest.mark.parametrize("module", REQUESTS)
def test_every_option_is_read_somewhere(module: str) -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items() if name not in REQUESTS]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    read |= {*SETTINGS, "http_port", "grpc_port", "metrics_port"}  # read by a part of their names
    requests = [kind for kind in vars(importlib.import_module(f"trtopt.{module}")).values() if is_dataclass(kind)]
    assert {item.name for kind in requests for item in fields(kind)} - read == set()


BARE = """
import importlib, sys
for name in ("onnx", "onnx_ir", "onnxscript", "google"):
    class Absent:
        def find_spec(self, name, path=None, target=None, top=name):
            if name.partition(".")[0] == top:
                raise ModuleNotFoundError(f"No module named {top!r}", name=top)
    sys.meta_path.insert(0, Absent())
import trtopt, trtopt.cli
for name in ("Session", "Batcher", "run", "bench", "profile", "inspect", "version", "doctor", "deploy_triton", "serve",
             "list_store"):
    getattr(trtopt, name)
for name in ("check", "build", "export", "calibrate", "verify"):
    try:
        getattr(trtopt, name)
    except trtopt.MissingDependency as error:
        assert "pip install" in str(error), error
    else:
        raise SystemExit(f"{name} needs no onnx any more: name it above")
"""


def test_what_runs_engines_needs_nothing_that_works_on_graphs() -> None:
    """The base install, and the lean environments (docs/lean.md)."""
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
