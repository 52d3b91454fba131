"""A model, data for it and an output folder, and the command line run on them in the test's own process."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import written
from numpy.typing import NDArray
from onnx import ModelProto
from PIL import Image
from skimage import data

from trtopt import cli
from trtopt.core.progress import Reporter

PHOTO = data.astronaut()
RTX = ("--backend", "rtx", "--target", "sm89")


def unnumbered(plan: bytes | memoryview) -> bytes:
    """A TensorRT-RTX plan without the numbers in the names it makes up, the only bytes that differ between builds.

    About one INT8 build in fifteen numbers its auxiliary tensors differently, on an idle machine and with one thread.
    """
    return re.sub(rb"__mye\d+", b"__mye", bytes(plan))


class Heard(Reporter):
    """What users would have been told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def crops(count: int) -> list[NDArray[np.uint8]]:
    return [PHOTO[8 * index : 8 * index + 96, 4 * index : 4 * index + 96] for index in range(count)]


def samples(count: int) -> NDArray[np.float32]:
    """Pieces of a photo as the model takes them."""
    pieces = [PHOTO[7 * index : 7 * index + 32, 7 * index : 7 * index + 32] for index in range(count)]
    return np.stack(pieces).transpose(0, 3, 1, 2).astype(np.float32) / 255


def net() -> ModelProto:
    """Return a model: x (n, 3, 32, 32) → Conv → Relu → Conv → Relu → GlobalAveragePool → Flatten → y."""
    text = """(float[n, 3, 32, 32] x) => (float[n, 16] y) {
        [conv1] a = Conv <pads = [1, 1, 1, 1]> (x, w1) [relu1] b = Relu (a) [conv2] c = Conv <pads = [1, 1, 1, 1]> (b, w2)
        [relu2] d = Relu (c) [pool] e = GlobalAveragePool (d) [flatten] y = Flatten (e) }"""
    random = np.random.default_rng(0)
    w1, w2 = random.standard_normal((16, 3, 3, 3)) / 5, random.standard_normal((16, 16, 3, 3)) / 12
    return written(text, w1=w1.astype(np.float32), w2=w2.astype(np.float32))


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


class World:
    """A model, data for it and an output folder; runs the command line in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.output = folder, folder / "out"
        self._patch, self._captured = monkeypatch, capfd
        self.output.mkdir()
        self.model = folder / "model.onnx"
        onnx.save(net(), self.model)
        self.arrays = folder / "data.npz"
        np.savez(self.arrays, x=samples(40))
        self.photos = folder / "photos"
        self.photos.mkdir()
        for index, crop in enumerate(crops(4)):
            Image.fromarray(crop).save(self.photos / f"{index}.jpg", quality=95)

    def run(self, *arguments: object) -> Outcome:
        self._captured.readouterr()
        self._patch.setattr(sys, "argv", ["trtopt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self._captured.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, out, err)

    def refused(self, *arguments: object) -> str:
        """The message of a command that must fail, checked against all that every failure owes."""
        before = self.contents()
        found = self.run(*arguments, "--json")
        assert found.status not in (0, 70), found
        assert "Traceback" not in found.err
        result = json.loads(found.out)
        assert list(result) == ["error"]
        assert set(result["error"]) == {"type", "message", "options"}
        message = str(result["error"]["message"])
        assert message == message.strip()
        assert found.err.endswith(f"error: {message}\n")
        assert found.err.lower().count("error:") == f"error: {message}".lower().count("error:") == 1, found.err
        assert self.contents() == before
        return message

    def contents(self) -> dict[str, bytes | None]:
        """Every path under the output folder, hidden ones too, with its content."""
        return {
            str(path.relative_to(self.output)): path.read_bytes() if path.is_file() else None
            for path in self.output.rglob("*")
        }


def requests() -> list[type[Any]]:
    """List every request of a stage."""
    folder = Path(cli.__file__).parents[1]
    rooms = [
        importlib.import_module(f"trtopt.{path.parent.name}.request") for path in sorted(folder.glob("*/request.py"))
    ]
    items = [(room.__name__, item) for room in rooms for item in vars(room).values()]
    found = [item for name, item in items if is_dataclass(item) and isinstance(item, type) and item.__module__ == name]
    return [item for item in found if item.__name__.endswith("Request")]  # and no `OpeningOptions`


def has(message: str, *words: str) -> None:
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
