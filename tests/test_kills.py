"""Commands that are killed or told to end, at any moment: outputs stay whole, and nothing is left behind.

`--kills N` sends each signal N times during each command (once by default) and, if more than 2, lets the command end after
every two: `pytest -n 0 tests/test_kills.py --kills 20` is the whole test, in about ten minutes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from world import RTX, net, samples

import trtopt
from trtopt.calibration.table import Table
from trtopt.core.errors import EngineMismatch
from trtopt.core.temporary import SUFFIX
from trtopt.engine.manifest import load_manifest, manifest_path

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
HANG = 30.0  # seconds


COMMANDS = {
    "build": ["m.onnx", "--fp16", *RTX, "-o", "out/m.engine", "--save-onnx", "out/m.kept.onnx"],
    "calibrate": ["m.onnx", "--data", "d.npz", "--no-cache", "-o", "out/m.calib.json"],
    "pipeline": ["net.toml", "--output", "out", "--precision", "fp16", *RTX],
}


class Scene:
    """One command in a folder of its own, each time with another model, so that there is always something to do."""

    def __init__(self, folder: Path, command: str) -> None:
        self.folder, self.command, self.models = folder, command, 0
        self.seconds = HANG  # that it takes undisturbed
        self.outputs, self.temporary = folder / "out", folder / "tmp"
        for name in ("out", "tmp", "home"):
            (folder / name).mkdir()
        np.savez(folder / "d.npz", x=samples(40))
        (folder / "net.toml").write_text('description = "a net"\nsource = "m.onnx"\n')
        own = {"TMPDIR": self.temporary, "HOME": folder / "home", "TRTOPT_CACHE": folder / "cache"}
        own["PYTHONPATH"] = Path(trtopt.__file__).parents[1]
        self.environment = os.environ | {name: str(path) for name, path in own.items()}

    def start(self) -> subprocess.Popen[str]:
        self.models += 1
        model = net()
        for tensor in model.graph.initializer:
            scaled = numpy_helper.to_array(tensor) * np.float32(1 + self.models / 100)
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))
        onnx.save(model, self.folder / "m.onnx")
        words = [sys.executable, "-m", "trtopt", self.command, *COMMANDS[self.command]]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, cwd=self.folder, env=self.environment, text=True, **quiet)

    def undisturbed(self) -> None:
        """Run it to its end: it succeeds, and removes what others left."""
        started = time.monotonic()
        said = self.start()
        error = said.communicate(timeout=10 * HANG)[1]
        assert said.returncode == 0, error
        self.seconds = min(self.seconds, time.monotonic() - started)
        assert self.leftovers() == set()
        assert self.check_outputs() > 0

    def signalled(self, number: signal.Signals, delay: float) -> int:
        """The exit status; that nothing is broken is asserted."""
        before, run = self.leftovers(), self.start()
        time.sleep(delay)
        run.send_signal(number)
        error = run.communicate(timeout=HANG)[1]
        assert "internal error" not in error, error
        assert "Traceback" not in error, error
        self.check_outputs(killed=number == signal.SIGKILL)
        if number == signal.SIGTERM:
            assert run.returncode in (0, 143, -number), error  # the last: before it could say what is to be done
            assert run.returncode != 143 or error.endswith("stopped\n"), error
            assert self.leftovers() <= before
        else:
            assert run.returncode in (0, -number), error
        return run.returncode

    def leftovers(self) -> set[str]:
        beside = [path for path in self.folder.rglob("*") if path.name.endswith(SUFFIX)]
        return {str(path) for path in [*beside, *self.temporary.iterdir()]}

    def check_outputs(self, killed: bool = False) -> int:
        """Each is whole, and belongs to what lies beside it. Two files can't take their names at once, so a kill may leave a
        new plan beside the old manifest; that is refused, not used."""
        for engine in self.outputs.glob("*.engine"):
            manifest = load_manifest(engine)
            assert manifest is not None
            try:
                manifest.check_plan(engine)
            except EngineMismatch:
                assert killed
                engine.unlink()
                manifest_path(engine).unlink()
        for manifest in self.outputs.glob("*.engine.json"):
            assert manifest.with_suffix("").is_file()
        for model in self.outputs.glob("*.onnx"):
            onnx.checker.check_model(onnx.load(model))
        for table in self.outputs.glob("*.calib.json"):
            Table.load(table)
        return len(list(self.outputs.iterdir()))


@pytest.mark.parametrize("command", COMMANDS)
def test_signals_at_any_moment(command: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if command != "calibrate":
        pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    times = pytestconfig.getoption("--kills")
    scene, random_ = Scene(tmp_path, command), random.Random(command)
    scene.undisturbed()
    ends = set[int]()
    for turn in range(times):
        for number in (signal.SIGKILL, signal.SIGTERM):
            if random_.random() < 0.3:
                for path in scene.outputs.iterdir():
                    path.unlink()
            delay = scene.seconds * (turn + random_.random()) / times  # spread over the run
            while (status := scene.signalled(number, delay)) == 0:
                delay /= 2  # it had ended: the machine was slower when its time was taken
            ends.add(status)
        if times > 2:
            scene.undisturbed()
    scene.undisturbed()
    assert -signal.SIGKILL in ends and (times <= 2 or 143 in ends)
