"""Ordinary models that torch's exporter fails on, or writes as a loop, without `traceable`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: TID251
from torch import nn  # noqa: TID251

from trtopt.core.errors import ModelError
from trtopt.frontend.exporter import export
from trtopt.graph.io import load_model


class Windows(nn.Module):
    """Attention of windows among samples (five axes), as Swin's and SAM's image encoders; or without heads (three)."""

    def __init__(self, mask: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.rows = nn.Linear(16, 48)
        self.mask = None if mask is None else nn.Buffer(torch.randn(mask))

    def forward(self, x: Any) -> Any:
        rows = self.rows(x)
        if x.dim() == 3:
            query, key, value = rows.chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(query, key, value, self.mask)
        query, key, value = rows.reshape(*rows.shape[:3], 3, 2, 8).permute(3, 0, 1, 4, 2, 5).unbind(0)
        found = nn.functional.scaled_dot_product_attention(query, key, value, self.mask)
        return found.transpose(2, 3).reshape(*x.shape)


class PaddedText(nn.Module):
    """BERT's mask: what is added to attention's scores where a token is padding."""

    def forward(self, mask: Any) -> Any:
        return (1.0 - mask[:, None, None]) * -10000.0


@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        ("batch,9,16", (1, 9, 9)),
        ("batch,windows,9,16", None),
        ("batch,windows,9,16", (2, 9, 9)),
        ("batch,4,9,16", (1, 4, 2, 9, 9)),
    ],
)
def test_attention_with_more_or_fewer_axes_than_four(shape: str, mask: tuple[int, ...] | None, tmp_path: Path) -> None:
    result = export(Windows(mask), tmp_path / "m.onnx", inputs=[f"x:{shape}"])
    assert result.comparisons and max(item.relative for item in result.comparisons) < 1e-5


def test_a_mask_of_integers(tmp_path: Path) -> None:
    assert export(PaddedText(), tmp_path / "m.onnx", inputs="mask:batch,sequence:int64").comparisons


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [torch.cat([x, x]).chunk(2), [y]],
        lambda x, y: [torch.split(torch.cat([x, y]), x.shape[0]), [x]],
        lambda x, y: [x.chunk(2, 1), x.split(3, 1)[:2]],  # of a size that is known
    ],
)
def test_parts_of_an_open_axis(function: Any, tmp_path: Path) -> None:
    """Stable Diffusion's guidance doubles a batch, RAFT takes two images at once."""

    class Parted(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            parts, others = function(x, y)
            return [part * place for place, part in enumerate((*parts, *others), 1)]

    made = export(Parted(), tmp_path / "m.onnx", inputs=["x:batch,6,width", "y:batch,6,width"], tolerance=0)
    assert len(made.comparisons) > 2, "at another width, too"
    operators = {node.op_type for node in load_model(tmp_path / "m.onnx").proto.graph.node}
    assert not any("Sequence" in name for name in operators)


def test_the_opset_that_is_suggested_is_one_that_has_it(tmp_path: Path) -> None:
    class Largest(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.zeros(x.shape[0], 3).scatter_reduce(1, x.argsort(1) % 3, x, "amax")

    with pytest.raises(ModelError, match=r"came with opset 18\ngive `opset=18`"):
        export(Largest(), tmp_path / "m.onnx", inputs="x:batch,12")
    assert export(Largest(), tmp_path / "m.onnx", inputs="x:batch,12", opset=18).comparisons
