"""PyTorch's custom operators: exported as nodes of their own, computed elsewhere by their own eager code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from documented import ROOT
from graphs import values

import trtopt
from trtopt.core.errors import ModelError
from trtopt.core.operators import known, load_reference
from trtopt.graph.io import load_model
from trtopt.graph.proto import attributes_of, custom_nodes, inferred_values, tensor_info
from trtopt.graph.work import macs

pytestmark = pytest.mark.usefixtures("no_operators")
MODULE = """
import torch
from torch import nn


@torch.library.custom_op("acme_ops::swishy", mutates_args=())
def swishy(x: torch.Tensor, beta: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * x * torch.sigmoid(beta * x)


@swishy.register_fake
def _(x, beta, scale=1.0):
    return torch.empty_like(x)


@torch.library.custom_op("acme_ops::parted", mutates_args=())
def parted(
    x: torch.Tensor, sizes: list[int], mode: str, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.split(x, sizes, 1)
    return (2 * a).contiguous(), (b * 3).contiguous()


@parted.register_fake
def _(x, sizes, mode, bias=None):
    return tuple(x.new_empty(x.shape[0], size, *x.shape[2:]) for size in sizes)


@torch.library.custom_op("acme_ops::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: list[torch.Tensor]) -> torch.Tensor:
    return x * by[0]


@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(16, 32, 1)
        self.beta = nn.Parameter(torch.rand(1, 32, 1, 1))

    def forward(self, x):
        a, b = parted(swishy(self.first(x), self.beta, 1.5), [16, 16], "fast")
        return self.last(a), b


class Lists(nn.Module):
    def forward(self, x):
        return scaled(x, [x])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operators")
    (folder / "acme.py").write_text(MODULE)
    np.savez(folder / "data.npz", x=values(40, 3, 16, 16))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    trtopt.export(f"{folder / 'acme.py'}:Net", folder / "net.onnx", inputs={"x": ("batch", 3, 16, 16)})
    return folder / "net.onnx"


def test_a_custom_operator_is_a_node_in_the_domain_of_its_namespace(model: Path) -> None:
    swishy, parted = custom_nodes(onnx.load(model))
    assert (swishy.domain, swishy.op_type, attributes_of(swishy)) == ("acme_ops", "swishy", {"scale": 1.5})
    assert attributes_of(parted) == {"sizes": [16, 16], "mode": "fast"} and len(parted.output) == 2
    known = inferred_values(onnx.load(model))
    assert tensor_info(known[parted.output[1]]).shape == ("batch", 16, 16, 16)


def test_shapes_follow_from_the_fake_kernel_where_the_file_says_none(model: Path) -> None:
    net = onnx.load(model)
    del net.graph.value_info[:]
    swishy, parted = custom_nodes(net)
    found = inferred_values(net)
    assert tensor_info(found[swishy.output[0]]).shape == ("batch", 32, 16, 16)
    assert tensor_info(found[parted.output[0]]).shape == ("batch", 16, 16, 16)


def test_another_process_takes_the_eager_code_from_the_file_that_is_named(folder: Path, model: Path) -> None:
    command = [sys.executable, "-m", "trtopt", "calibrate", str(model), "--data", str(folder / "data.npz")]
    output = folder / "net.calib.json"
    alone = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert alone.returncode == 2 or alone.returncode == 1, alone
    assert "nothing here computes the operator acme_ops::" in alone.stderr and not output.exists()
    found = subprocess.run(
        [*command, "-o", str(output), "--operators", str(folder / "acme.py")], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert {"x", *custom_nodes(onnx.load(model))[1].output[:1]} == trtopt.Table.load(output).amax.keys()


def test_what_no_node_can_hold_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"acme_ops::scaled takes by of type List\[Tensor\]: a node takes tensors"):
        trtopt.export(f"{folder / 'acme.py'}:Lists", tmp_path / "lists.onnx", inputs={"x": ("batch", 3)})
    assert not list(tmp_path.iterdir())


def test_work_is_counted_behind_custom_operators(model: Path) -> None:
    first, last = macs(load_model(model).proto).values()
    assert (first, last) == (32 * 3 * 9 * 256, 32 * 16 * 256)


def test_the_page_is_right_as_far_as_no_gpu_is_needed(folder: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "custom-operators.md").read_text(encoding="utf-8")
    commands, program, project, _ = re.findall(r"^```(?:bash|python)\n(.*?)^```$", page, re.S | re.M)
    (tmp_path / "net.py").write_text(MODULE)
    np.savez(tmp_path / "data.npz", x=values(40, 3, 32, 32))
    for line in (*commands.splitlines(), project.splitlines()[0].partition("#")[0]):
        assert line.startswith("trtopt ")
        done = subprocess.run([sys.executable, "-m", *line.split()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "net.calib.json").is_file()
    (tmp_path / "ops.py").write_text(program)
    for name, kernel in (("ops.py", None), ("swishy.py", tmp_path / "swishy.cu")):
        load_reference(tmp_path / name)
        found = known("acme", "Swishy")
        assert found is not None and (found.types, found.kernel) == (("fp32", "fp16"), kernel)
