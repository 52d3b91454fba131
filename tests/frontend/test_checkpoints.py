"""Files of weights and pickles: each is told what it is and what to type, without unpickling."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch  # noqa: TID251

from trtopt.core.errors import UsageError
from trtopt.frontend.exporter import export


class Net(torch.nn.Linear):
    pass


def test_each_kind_of_file_has_its_way_out(tmp_path: Path) -> None:
    torch.save(Net(2, 2), tmp_path / "whole.pt")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "script.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("a/data.pkl", f"cos\nmkdir\n(X\x03\x00\x00\x00{tmp_path}/xtR.".encode())
    weights = ["--weights", "my_model.py:Net", "whole pickled model", ".state.pth", "yolo export model="]
    words = dict.fromkeys(("whole", "empty", "evil", "absent"), weights)
    for name, expected in {**words, "script": ["TorchScript", "state_dict()"]}.items():
        with pytest.raises(UsageError) as caught:
            export(tmp_path / f"{name}.pt", tmp_path / "m.onnx")
        assert all(word in str(caught.value) for word in expected), caught.value
    assert not (tmp_path / "x").exists()  # nothing of a pickle is run
