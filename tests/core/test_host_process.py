"""Stages that work in several threads at once give what they give alone, and leave the process as they found it.

`--host-rounds N` lets each thread go through all of them N times (once by default): `pytest -n 0
tests/core/test_host_process.py --host-rounds 50` is the whole test.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch  # noqa: TID251
from world import net, samples, unnumbered

from trtopt.builder.construction import build
from trtopt.calibration.calibrator import calibrate
from trtopt.frontend.exporter import export
from trtopt.graph.passes.fold import fold
from trtopt.linting.checker import check

pytestmark = pytest.mark.usefixtures("rtx")
THREADS = 8
FACTORY = """
import logging, warnings
import torch

warnings.warn("made")
logging.getLogger("torch.onnx").warning("made")

def small():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
"""


def host() -> dict[str, Any]:
    """All of the process that a library could change, the objects themselves where there are."""
    for thread in threading.enumerate():
        if thread.name == "trtopt-digests":  # reads the samples of a stage that was left: it ends by itself
            thread.join(60)
    named = {**logging.root.manager.loggerDict, "root": logging.root}
    return {
        "streams": (sys.stdout, sys.stdout.write, sys.stderr, sys.stderr.write),
        "warning filters": (id(warnings.filters), list(warnings.filters), warnings.showwarning),
        "loggers": {
            name: {**vars(item), "_cache": None} for name, item in named.items() if isinstance(item, logging.Logger)
        },
        "logging": (logging.root.manager.disable, logging.Logger.callHandlers),
        "umask": [line for line in Path("/proc/self/status").read_text().splitlines() if "Umask" in line],
        "environment": dict(os.environ),
        "garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()),
        "folder": Path.cwd(),
        "imports": (list(sys.path), {name for name in sys.modules if name.startswith(("small_", "own_"))}),
        "network": socket.getaddrinfo,
        "hooks": (sys.excepthook, threading.excepthook, sys.displayhook),
        "NumPy": np.geterr(),
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()),
        "processes": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what isn't as before; loggers that came with an import in the meantime are no change."""
    seen = {name: (before[name], after[name]) for name in before if name != "loggers" and before[name] != after[name]}
    loggers = {
        name: (value, after["loggers"].get(name))
        for name, value in before["loggers"].items()
        if after["loggers"].get(name) != value
    }
    return seen | ({"loggers": loggers} if loggers else {})


class Stages:
    """A tiny model and what each stage gives for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.data = folder, folder / "model.onnx", samples(6)
        onnx.save(net(), self.model)

    def fold(self, _: Path) -> object:
        folded, report = fold(onnx.load(self.model))
        return folded.SerializeToString(deterministic=True), report.problem

    def check(self, _: Path) -> object:
        report = check(self.model, backend="rtx", target="sm89")
        return [str(finding) for finding in report.findings]

    def calibrate(self, own: Path) -> object:
        table = calibrate(self.model, own / "table.json", data=self.data, cache=False, threads=1).table
        return table.digest, dict(table.amax)

    def build(self, own: Path) -> object:
        result = build(self.model, own / "m.engine", fp16=True, target="sm89", backend="rtx", force=True)
        return unnumbered(result.engine.read_bytes()), result.engine.stat().st_mode, result.manifest.stat().st_mode

    def export(self, own: Path) -> object:
        source = own / f"small_{own.name}.py"
        source.write_text(FACTORY)
        result = export(f"{source}:small", own / "exported.onnx", inputs={"x": ("batch", 3, 8, 8)})
        return result.verified, onnx.load(result.path).graph.SerializeToString(deterministic=True)

    @property
    def all(self) -> list[Callable[[Path], object]]:
        return [self.fold, self.check, self.calibrate, self.build, self.export]

    def own(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder


def test_threads_at_work_change_nothing_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRTOPT_DEBUG", raising=False)
    rounds, stages = pytestconfig.getoption("--host-rounds"), Stages(tmp_path)
    expected = {stage.__name__: stage(stages.own("alone")) for stage in stages.all}  # which also imports the libraries
    capsys.readouterr()
    before, interval = host(), sys.getswitchinterval()

    def work(number: int) -> None:
        own = stages.own(f"t{number}")
        for turn in range(rounds):
            for place in range(len(stages.all)):
                stage = stages.all[(number + turn + place) % len(stages.all)]  # each thread begins with another
                assert stage(own) == expected[stage.__name__], stage.__name__
                print(f"heard {number}\n", end="")  # one write: others print meanwhile

    sys.setswitchinterval(1e-4)  # threads take turns as often as they can
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))
    finally:
        sys.setswitchinterval(interval)
    assert changes(before, host()) == {}
    said = capsys.readouterr()
    assert sorted(said.out.split("\n")) == sorted(
        [""] + [f"heard {number}" for number in range(THREADS) for _ in range(rounds * len(stages.all))]
    )
    assert said.err == ""
