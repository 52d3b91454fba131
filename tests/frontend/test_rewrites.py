from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch  # noqa: TID251

from trtopt.frontend.exporter import export
from trtopt.graph.io import load_model
from trtopt.ort.sessions import OnnxSession


class Bags(torch.nn.Module):
    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.head = torch.nn.EmbeddingBag(40, 16, mode=mode, **options), torch.nn.Linear(16, 4)

    def forward(self, ids: Any, offsets: Any = None) -> Any:
        return self.head(self.bags(ids, offsets))


class Weighted(Bags):
    def forward(self, ids: Any, shares: Any) -> Any:
        return self.head(self.bags(ids, None, shares))


IDS = np.random.default_rng(0).integers(0, 40, (6, 7))
IDS[2] = 3
IDS[1, :4] = 3
LIST = IDS.reshape(-1)


def exported(module: torch.nn.Module, inputs: list[str], sample: Any, folder: Path) -> onnx.ModelProto:
    """It is compared with PyTorch's own, at two batch sizes where they are open."""
    assert export(module, folder / "bags.onnx", inputs=inputs, sample=sample).comparisons
    proto = load_model(folder / "bags.onnx").proto
    assert {"Loop", "SequenceEmpty"}.isdisjoint(node.op_type for node in proto.graph.node)
    return proto


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}])
def test_rows_of_bags_of_one_length(mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    exported(Bags(mode, **options), ["ids:batch,length:int64"], {"ids": IDS}, tmp_path)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"include_last_offset": True}])
def test_bags_that_offsets_cut(mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    ids, offsets = LIST[:12], np.array([0, 2, 2, 7, 9, 9, 9, 10, 11, 11, 11, 12])
    exported(Bags(mode, **options), ["ids:12:int64", "offsets:12:int64"], {"ids": ids, "offsets": offsets}, tmp_path)


def test_the_number_of_bags_may_be_open(tmp_path: Path) -> None:
    arrays = {"ids": LIST[:12], "offsets": np.array([0, 2, 2, 7, 9, 9, 9, 10, 11, 11, 11, 12])}
    proto = exported(Bags("mean"), ["ids:n:int64", "offsets:n:int64"], arrays, tmp_path)
    found = OnnxSession(proto)({"ids": LIST[:12], "offsets": np.array([0, 5])[[0] + [1] * 11]})["output"]
    assert np.allclose(found[1:11], found[1]) and not np.allclose(found[0], found[11])


def test_rows_with_shares(tmp_path: Path) -> None:
    shares = np.random.default_rng(1).random(IDS.shape).astype(np.float32)
    exported(
        Weighted("sum"), ["ids:batch,length:int64", "shares:batch,length"], {"ids": IDS, "shares": shares}, tmp_path
    )


def test_pytorch_has_its_own_again(tmp_path: Path) -> None:
    before = torch.nn.functional.embedding_bag
    exported(Bags("mean"), ["ids:batch,7:int64"], {"ids": IDS}, tmp_path)
    assert torch.nn.functional.embedding_bag is before
