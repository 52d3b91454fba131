from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_session import FakeCuda, Open
    from world import World

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # tests import ONNX Runtime themselves

os.environ.pop("TRTOPT_STORE", None)  # the user's own: builds here are builds

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs; tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

with contextlib.suppress(ImportError):  # a GPU host need not have it
    from hypothesis import settings

    settings.register_profile("no deadline", deadline=None)  # another process may take the machine for half a second
    settings.load_profile("no deadline")


# Files that take minutes: they begin first, so that at the end no process works while the other has nothing left.
LONG = (
    "zoo/",
    "test_models.py",
    "jobs/",
    "test_pages.py",
    "graph/test_output_kinds.py",
    "test_workflow.py",
    "test_kills.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=1, help="Times that test_kills.py sends each signal to each command.")
    parser.addoption("--host-rounds", type=int, default=1, help="Rounds of test_host_process.py, in each thread.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(root).as_posix()
        return next((index for index, start in enumerate(LONG) if path.startswith(start)), len(LONG))

    items.sort(key=place)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> World:
    from world import World  # here: tests/gpu run on hosts without its photo packages

    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRTOPT_DEBUG", "")  # a command's -v sets it: put back afterwards
    return World(tmp_path, monkeypatch, capfd)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """A fake CUDA of which everything must be freed at the end."""
    from fake_session import checked_cuda

    yield from checked_cuda()


@pytest.fixture
def open_session(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens sessions on a fake engine; closes them at the end."""
    from fake_session import opening

    yield from opening(cuda, tmp_path, monkeypatch)


@contextlib.contextmanager
def alone_in(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder of all processes of a session, for one of them at a time."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of a recipe or of torchvision (random weights) as ONNX, exported once for all processes of a session."""
    from trtopt.frontend.exporter import export

    def get(source: str) -> Path:
        with alone_in(tmp_path_factory, "exported") as folder:
            made = folder / f"{source.replace(':', '.')}.onnx"
            if not made.exists():
                export(source, made, verify=False)
        return made

    return get


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment outside the checkout with a wheel of it, made once for all processes of a session."""
    from wheel_environment import build_wheel, install

    with alone_in(tmp_path_factory, "installed") as folder:
        if not (folder / "made").exists():
            install(build_wheel(folder), folder / "venv")
            (folder / "made").touch()
    return folder / "venv"


@pytest.fixture(scope="session")
def lite0(exported: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with EfficientNet-Lite0 for RTX sm89, fp16.engine and int8.engine, with class names and their graphs."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    from trtopt.builder.construction import build
    from trtopt.data.samples import write_crops

    folder = tmp_path_factory.mktemp("lite0")
    write_crops("imagenet-crops", folder / "photos")
    model = exported("efficientnet-lite0")
    common: Any = {"target": "sm89", "preprocess": "efficientnet-lite", "classes": "imagenet"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTOPT_CACHE", str(folder / "cache"))
        build(model, folder / "fp16.engine", fp16=True, save_onnx=folder / "fp16.onnx", **common)
        common |= {"images": folder / "photos", "limit": 16, "save_onnx": folder / "int8.onnx"}
        build(model, folder / "int8.engine", int8=True, **common)
    return folder


@pytest.fixture
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")


@pytest.fixture
def no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Custom operators and plugins that a test registers are its own."""
    from trtopt.core import operators

    for name in ("_operators", "_references", "_plugins"):
        monkeypatch.setattr(operators, name, {})
    monkeypatch.delenv(operators.PLUGINS, raising=False)


@pytest.fixture
def operators_file(tmp_path: Path) -> Path:
    """The Python file that says what acme's operators compute."""
    from custom import OPERATORS

    path = tmp_path / "ops.py"
    path.write_text(OPERATORS)
    return path
