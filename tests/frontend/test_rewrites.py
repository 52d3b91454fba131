from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch  # noqa: TID251

from trtopt.core.errors import ModelError
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


class Attention(torch.nn.Module):
    """Attention of windows among samples (five axes), or of a sequence without heads (three)."""

    def __init__(self, mask: tuple[int, ...] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Linear(16, 48)
        self.mask = None if mask is None else torch.nn.Buffer(torch.randn(mask))

    def forward(self, x: Any) -> Any:
        rows = self.rows(x)
        if x.dim() == 3:
            query, key, value = rows.chunk(3, -1)
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, self.mask)
        query, key, value = rows.reshape(*rows.shape[:3], 3, 2, 8).permute(3, 0, 1, 4, 2, 5).unbind(0)
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, self.mask)
        return found.transpose(2, 3).reshape(*x.shape)


@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        ("batch,9,16", None),
        ("batch,9,16", (9, 9)),
        ("batch,9,16", (1, 9, 9)),
        ("batch,windows,9,16", None),
        ("batch,windows,9,16", (9, 9)),
        ("batch,windows,9,16", (2, 9, 9)),
        ("batch,4,9,16", (4, 1, 9, 9)),
        ("batch,4,9,16", (1, 4, 2, 9, 9)),
    ],
)
def test_attention_with_more_or_fewer_axes_than_four(shape: str, mask: tuple[int, ...] | None, tmp_path: Path) -> None:
    sizes = {"batch": 4, "windows": 4}
    sample = np.random.default_rng(0).standard_normal([sizes.get(size) or int(size) for size in shape.split(",")])
    before = torch.nn.functional.scaled_dot_product_attention
    result = export(
        Attention(mask), tmp_path / "m.onnx", inputs=[f"x:{shape}"], sample={"x": sample.astype(np.float32)}
    )
    assert max(item.relative for item in result.comparisons) < 1e-5
    assert torch.nn.functional.scaled_dot_product_attention is before


class Applied(torch.nn.Module):
    """A layer with weights, then a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = torch.nn.Linear(12, 12), function

    def forward(self, x: Any) -> Any:
        return self.function(self.layer(x))


FOLDS = {"non": (4, 1, 0, 4), "over": (3, 1, 1, 2), "wide": (3, 2, 2, 1)}


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances_of_all_pairs(p: float, tmp_path: Path) -> None:
    module = Applied(lambda x: torch.cdist(x.view(-1, 3, 4), x.view(-1, 4, 3).mT + 1, p))
    assert export(module, tmp_path / "m.onnx", inputs="x:batch,12").comparisons


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("window", [torch.hamming_window, torch.blackman_window])
def test_windows(window: Any, periodic: bool, tmp_path: Path) -> None:
    name = window.__name__
    module = Applied(lambda x: x * getattr(torch, name)(12, periodic))
    assert export(module, tmp_path / "m.onnx", inputs="x:batch,12").comparisons
    assert getattr(torch, name) is window  # as it was


@pytest.mark.parametrize("pads", [(3, 2, 0, 1), (1, 0, 2, 2)])
def test_padding_that_goes_around(pads: tuple[int, ...], tmp_path: Path) -> None:
    module = Applied(lambda x: torch.nn.functional.pad(x.view(-1, 1, 3, 4), pads, mode="circular"))
    assert export(module, tmp_path / "m.onnx", inputs="x:batch,12").comparisons


def test_the_opset_that_is_suggested_is_one_that_has_it(tmp_path: Path) -> None:
    module = Applied(lambda x: torch.zeros(x.shape[0], 3).scatter_reduce(1, x.argsort(1) % 3, x, "amax"))
    with pytest.raises(ModelError, match=r"came with opset 18\ngive `opset=18`"):
        export(module, tmp_path / "m.onnx", inputs="x:batch,12")
    assert export(module, tmp_path / "m.onnx", inputs="x:batch,12", opset=18).comparisons


def test_a_random_relu_is_its_mean(tmp_path: Path) -> None:
    assert export(Applied(torch.nn.RReLU()), tmp_path / "m.onnx", inputs="x:batch,12").comparisons


@pytest.mark.parametrize("name", FOLDS)
def test_blocks_are_put_together(name: str, tmp_path: Path) -> None:
    size, dilation, padding, stride = FOLDS[name]
    cut = torch.nn.Unfold(size, dilation, padding, stride)
    count = cut(torch.zeros(1, 3, 12, 12)).shape[-1]
    together = torch.nn.Fold((12, 12), size, dilation, padding, stride)

    class Blocks(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return together(torch.tanh(x))

    made = export(Blocks(), tmp_path / "m.onnx", inputs=f"x:batch,{3 * size * size},{count}")
    assert made.comparisons
    operators = {node.op_type for node in load_model(tmp_path / "m.onnx").proto.graph.node}
    assert "ConvTranspose" in operators and "Col2Im" not in operators


@pytest.mark.parametrize(
    ("hop", "options"),
    [
        (16, {}),
        (24, {"normalized": True}),  # no part of the frame's length
        (16, {"length": 640, "win_length": 48}),
        (32, {"center": False, "length": 700}),
    ],
)
def test_spectra_back_to_a_signal(hop: int, options: dict[str, Any], tmp_path: Path) -> None:
    class Denoiser(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            same = {"window": torch.hamming_window(options.get("win_length", 64)), "hop_length": hop, **options}
            length = same.pop("length", None)
            spectrum = torch.stft(x, 64, return_complex=True, **same)
            return torch.istft(spectrum * spectrum.abs().sigmoid(), 64, length=length, **same)

    sound = np.random.default_rng(0).standard_normal((4, 640)).astype(np.float32)
    made = export(Denoiser(), tmp_path / "m.onnx", inputs="x:batch,640", sample={"x": sound})
    assert made.comparisons
    assert len(load_model(tmp_path / "m.onnx").proto.graph.node) < 100  # not one for each value of a frame


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.median(1).values,
        lambda x: torch.median(x.view(-1, 3, 4), dim=1, keepdim=True)[0],
        lambda x: x.kthvalue(3, 1)[0],
        lambda x: torch.kthvalue(x, 2, keepdim=True).indices,
        lambda x: torch.hypot(x, x + 1),
        lambda x: x * (1.0 - (x > 0).long()),
        lambda x: x + torch.rsub((x > 0).int(), 2.0, alpha=3),
        lambda x: torch.bucketize(x, torch.linspace(-1, 1, 6)),
        lambda x: torch.searchsorted(torch.linspace(-1, 1, 6), x, right=True),
        lambda x: torch.searchsorted(x.sort(1)[0], x[:, :3], side="right"),
    ],
)
def test_what_the_exporter_has_no_form_for(function: Any, tmp_path: Path) -> None:
    assert export(Applied(function), tmp_path / "m.onnx", inputs="x:batch,12").comparisons


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [torch.cat([x, x]).chunk(2), [y]],
        lambda x, y: [torch.cat([x, y, x]).chunk(3, dim=-2), [y]],
        lambda x, y: [torch.chunk(torch.cat([x, y], -1), 2, -1), [y]],
        lambda x, y: [torch.split(torch.cat([x, y]), x.shape[0]), [x]],
        lambda x, y: [torch.cat([x, y]).split(y.shape[0], 0), [x]],
        lambda x, y: [x.chunk(2, 1), x.split(3, 1)[:2]],  # of a size that is known
    ],
)
def test_parts_of_an_open_axis(function: Any, tmp_path: Path) -> None:
    """As guidance doubles a batch, and optical flow takes two images at once: the exporter's sequences end with an error."""

    class Parted(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            parts, others = function(x, y)
            return [part * place for place, part in enumerate((*parts, *others), 1)]

    made = export(Parted(), tmp_path / "m.onnx", inputs=["x:batch,6,width", "y:batch,6,width"], tolerance=0)
    assert len(made.comparisons) > 2, "at another width, too"
    operators = {node.op_type for node in load_model(tmp_path / "m.onnx").proto.graph.node}
    assert not any("Sequence" in name for name in operators)
