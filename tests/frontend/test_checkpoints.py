"""Files of weights and pickles: each is told what it is and what to type, without unpickling."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch  # noqa: TID251

from trtopt.core.errors import ModelError, UsageError
from trtopt.frontend.checkpoints import advice
from trtopt.frontend.exporter import export


class Net(torch.nn.Linear):
    pass


def _pickled(path: Path, module: str, name: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00X\x05\x00\x00\x00modelc" + f"{module}\n{name}\n".encode())
    return path


def test_each_kind_of_file_has_its_way_out(tmp_path: Path) -> None:
    torch.save(Net(2, 2), tmp_path / "whole.pt")
    torch.save(Net(2, 2).state_dict(), tmp_path / "state.pt")
    torch.save({"state_dict": Net(2, 2).state_dict(), "epoch": 3}, tmp_path / "wrapped.pt")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    _pickled(tmp_path / "yolov8n.pt", "ultralytics.nn.tasks", "DetectionModel")
    (tmp_path / "old.pt").write_bytes(pickle.dumps([1]))
    (tmp_path / "empty.pt").write_bytes(b"")
    words = {
        "whole": [f"{__name__}.Net", "whole.state.pth", f"trtopt export {__name__}:Net --weights"],
        "state": ["--weights", "my_model.py:Net"],
        "wrapped": ["--weights", "my_model.py:Net"],
        "script": ["TorchScript", "state_dict()"],
        "yolov8n": ["yolo export model=", "format=onnx", "trtopt check yolov8n.onnx"],
        "old": ["--weights"],
        "empty": ["--weights"],
        "absent": ["--weights"],
    }
    for name, expected in words.items():
        with pytest.raises(UsageError) as caught:
            export(tmp_path / f"{name}.pt", tmp_path / "m.onnx")
        assert all(word in str(caught.value) for word in expected), caught.value


def test_nothing_of_the_pickle_is_run(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("a/data.pkl", f"cos\nmkdir\n(X\x03\x00\x00\x00{tmp_path}/xtR.".encode())
    assert "os.mkdir" in advice(tmp_path / "evil.pt")
    assert not (tmp_path / "x").exists()


def test_a_pickled_model_as_weights_is_named(tmp_path: Path) -> None:
    torch.save(Net(2, 2), tmp_path / "whole.pth")
    with pytest.raises(ModelError, match=rf"{__name__}\.Net.*whole\.state\.pth"):
        export(Net(2, 2), tmp_path / "m.onnx", inputs={"x": (1, 2)}, weights=tmp_path / "whole.pth")
