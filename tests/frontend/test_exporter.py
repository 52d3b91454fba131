"""PyTorch → ONNX: the same outputs, names and dynamic dimensions as asked, and clear errors that leave nothing behind."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID251
from torch import nn  # noqa: TID251
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.ops import deform_conv2d, nms, roi_align

import trtopt.frontend.comparison
from trtopt.core.errors import DataError, ExportMismatch, ModelError, OutputError, UsageError
from trtopt.core.values import TensorInfo
from trtopt.data import open_data
from trtopt.frontend.exporter import ExportResult, export
from trtopt.frontend.inputs import parse_input
from trtopt.frontend.modules import open_source, opened
from trtopt.graph.io import load_model
from trtopt.ort.sessions import OnnxSession
from trtopt.recipes.loader import package_file


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, pooled mean and a linear layer; the mean needs rewriting for opset 17."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


class Plain(nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Two(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a * 2


def make_net() -> nn.Module:
    return Net()


IMAGE: dict[str, Any] = {"image": ("batch", 3, "H", "W")}


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture
def photos() -> np.ndarray[Any, np.dtype[np.float32]]:
    files = [package_file(f"package:skimage/data/{name}") for name in ("coffee.png", "chelsea.png", "astronaut.png")]
    info = TensorInfo("image", "float32", ("batch", 3, 32, 48))
    return np.concatenate([part["image"] for part in open_data([info], images=files, preprocess="imagenet")])


def test_a_module_with_dynamic_height_and_width(tmp_path: Path, photos: Any) -> None:
    net, path = Net(), tmp_path / "net.onnx"
    net.norm.train()
    net.conv.eval()
    before = torch.get_num_threads()
    result = export(net, path, inputs=IMAGE, output_names=["scores"], sample=photos)
    assert isinstance(result, ExportResult) and result.path == path and result.opset == 17
    loaded = load_model(path)
    assert loaded.inputs == result.inputs == (TensorInfo("image", "float32", ("batch", 3, "H", "W")),)
    assert loaded.outputs == result.outputs == (TensorInfo("scores", "float32", ("batch", 5)),)
    assert [(item.batch, dict(item.sizes)) for item in result.comparisons] == [
        (1, {}),
        (3, {}),
        (1, {"H": 64, "W": 96}),
        (1, {"H": 33, "W": 49}),
    ]
    assert result.verified and result.sample == "an array" and result.weights == "the module's own"
    assert all(item.relative < 1e-4 for item in result.comparisons)
    assert (net.training, net.norm.training, net.conv.training) == (True, True, False)
    assert torch.get_num_threads() == before
    other = np.ascontiguousarray(photos[:1, :, :17, :29])
    with torch.no_grad():
        expected = net.eval()(torch.from_numpy(other)).numpy()
    assert np.allclose(OnnxSession(path)({"image": other})["scores"], expected, atol=1e-5)
    json.dumps(result.to_json())


def test_operators_that_opset_17_lacks_are_written_out(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Mish())  # which came with opset 18
    result = export(module, tmp_path / "m.onnx", inputs={"x": ("batch", 3, 8, 8)})
    assert result.opset == 17 and result.verified
    assert {node.domain for node in load_model(tmp_path / "m.onnx").proto.graph.node} == {""}


class Padded(nn.Module):
    """PyTorch's encoder of sentences: its fast path gives zeros where they are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.body(x, src_key_padding_mask=padding)


def test_an_encoder_of_padded_sentences(tmp_path: Path) -> None:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    inputs = {"x": ("n", 5, 16), "padding": TensorInfo("padding", "bool", ("n", 5))}
    x = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    sample = {"x": x, "padding": np.arange(5) >= np.array([[3], [5]])}
    assert export(Padded(), tmp_path / "m.onnx", inputs=inputs, sample=sample).verified
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


def test_static_shapes_names_and_opset_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = export(Net(), tmp_path / "m.onnx", inputs={"pixels": (2, 3, 16, 16)}, opset=18)
    assert result.inputs == (TensorInfo("pixels", "float32", (2, 3, 16, 16)),) and result.opset == 18
    assert [item.batch for item in result.comparisons] == [2] and capfd.readouterr() == ("", "")


def test_a_factory_and_weights(tmp_path: Path) -> None:
    torch.manual_seed(7)
    trained = Net()
    wrapped = {"state_dict": {f"module.{name}": value for name, value in trained.state_dict().items()}}
    torch.save(wrapped, tmp_path / "w.pth")
    result = export(
        f"{__name__}:make_net", tmp_path / "m.onnx", inputs={"x": ("batch", 3, 8, 8)}, weights=tmp_path / "w.pth"
    )
    assert result.weights == str(tmp_path / "w.pth")
    sample = np.ones((2, 3, 8, 8), np.float32)
    with torch.no_grad():
        expected = trained.eval()(torch.from_numpy(sample)).numpy()
    found = OnnxSession(tmp_path / "m.onnx")({"x": sample})
    assert np.allclose(next(iter(found.values())), expected, atol=1e-5)


def test_torchvision_says_that_weights_are_random(tmp_path: Path) -> None:
    result = export("torchvision:squeezenet1_1", tmp_path / "m.onnx")
    assert result.weights == "random (seed 0)" and any("random weights" in note for note in result.notes)
    assert result.inputs == (TensorInfo("input", "float32", ("batch", 3, 224, 224)),)
    assert result.sample == "synthetic (seed 0)" and [item.batch for item in result.comparisons] == [1, 2]


def test_lite0_from_its_recipe_classifies_a_photo(tmp_path: Path) -> None:
    result = export("efficientnet-lite0", tmp_path / "m.onnx")
    assert result.verified and result.opset == 17
    assert result.weights.endswith("efficientnet-lite0-57934424.pth")
    assert max(item.relative for item in result.comparisons) < 1e-4
    cat = [package_file("package:skimage/data/chelsea.png")]
    batch = next(iter(open_data(load_model(tmp_path / "m.onnx").inputs, images=cat, preprocess="efficientnet-lite")))
    cats = {"tabby": 281, "tiger": 282, "Egyptian": 285}
    assert int(OnnxSession(tmp_path / "m.onnx")(batch)["logits"].argmax()) in cats.values()


@pytest.mark.parametrize("fault", ["differs", "differs elsewhere", "fails elsewhere"])
def test_a_mismatch_writes_nothing(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere: a trace that holds the size that it was made at."""

    class Wrong:
        def __init__(self, model: Any) -> None:
            self.real = OnnxSession(model)

        def __call__(self, inputs: Any) -> Any:
            here = inputs["x"].shape[2:] == (8, 8)
            if not here and fault == "fails elsewhere":
                raise ModelError("Shape mismatch")
            return {name: array + 0.1 * (fault == "differs" or not here) for name, array in self.real(inputs).items()}

    monkeypatch.setattr(trtopt.frontend.comparison, "OnnxSession", Wrong)
    asked: dict[str, Any] = {"inputs": {"x": ("batch", 3, "H", "W")}, "sample": np.ones((2, 3, 8, 8), np.float32)}
    with pytest.raises(ExportMismatch, match="Nothing was written") as caught:
        export(Net(), tmp_path / "m.onnx", **asked)
    held = "traced with H 8, W 8, and its ONNX model is right there alone: PyTorch runs it with H 16, W 16"
    assert ("disagree" in str(caught.value), held in str(caught.value)) == (fault[0] == "d", "elsewhere" in fault)
    assert list(tmp_path.iterdir()) == []
    result = export(Net(), tmp_path / "m.onnx", **asked, verify=False)
    assert not result.verified and any("not compared" in note for note in result.notes)


class Choosy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and x.shape[-1] not in self.sizes:
            raise ValueError("not this size")
        return super().forward(x)


def test_another_size_that_pytorch_takes_is_compared_or_it_is_said(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"inputs": {"x": ("batch", 3, "H", "W")}, "sample": np.ones((2, 3, 8, 8), np.float32)}
    model = Choosy()
    model.sizes = {8, 4}
    found = export(model, tmp_path / "m.onnx", **asked).comparisons
    assert [dict(item.sizes) for item in found] == [{}, {}, {"H": 4, "W": 4}]
    model.sizes = {8}
    result = export(model, tmp_path / "m.onnx", **asked)
    assert "PyTorch doesn't take H 16, W 16 or H 4, W 4" in " ".join(result.notes)


class Padding(nn.Module):
    """Filled up to a multiple of 4 where that is needed, as a U-Net of any size is."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.down, self.up = always, nn.Conv2d(3, 4, 4, stride=4), nn.ConvTranspose2d(4, 3, 4, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        missing = (-height) % 4, (-width) % 4
        filled = nn.functional.pad(x, (0, missing[1], 0, missing[0])) if self.always or any(missing) else x
        return self.up(self.down(filled))[..., :height, :width]


def test_a_decision_by_size_that_the_trace_holds_is_said(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"inputs": {"x": ("batch", 3, "H", "W")}}
    result = export(Padding(always=False), tmp_path / "held.onnx", **asked)
    [note] = [note for note in result.notes if "not at every size" in note]
    assert "H 224, W 224 and H 448, W 448, but" in note and "PyTorch runs it with H 225, W 225" in note
    assert [dict(item.sizes) for item in result.comparisons] == [{}, {}, {"H": 448, "W": 448}]
    result = export(Padding(always=True), tmp_path / "free.onnx", **asked)
    assert dict(result.comparisons[-1].sizes) == {"H": 225, "W": 225}
    assert not any("every size" in note for note in result.notes)


@dataclass
class Result:
    boxes: torch.Tensor
    add: torch.Tensor
    loss: torch.Tensor | None = None


class Own(nn.Module):
    """What torch's exporter stumbles over: a submodule named as its graph's own attribute, a dataclass, a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.meta = nn.Linear(3, 4)

    def forward(self, image: torch.Tensor, bias: Any = None, *, ids: torch.Tensor) -> Result:
        mean = self.meta(image.mean((2, 3))) + ids.sum(1, keepdim=True)
        return Result(mean * 2, image if bias is None else image + bias)


def test_inputs_in_any_order_and_outputs_by_their_fields(tmp_path: Path) -> None:
    inputs = {"ids": TensorInfo("ids", "int64", ("batch", "n")), "image": ("batch", 3, 8, 8)}
    result = export(Own(), tmp_path / "m.onnx", inputs=inputs)
    assert [(info.name, info.shape) for info in result.inputs] == [
        ("image", ("batch", 3, 8, 8)),
        ("ids", ("batch", "n")),
    ]
    assert [info.name for info in result.outputs] == ["boxes", "add"] and result.verified
    assert any("output loss is None" in note for note in result.notes)
    proto = load_model(tmp_path / "m.onnx").proto
    assert {"meta.weight", "meta.bias"} <= {item.name for item in proto.graph.initializer}
    made = [name for node in proto.graph.node for name in node.output]
    assert len(made) == len(set(made))


def broken(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(5, 5)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Positions by complex numbers, as Llama's first code has them."""
    angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1]))
    turned = torch.view_as_complex(x.reshape(-1, 6, 2, 2)) * torch.polar(torch.ones(6, 2), angles)[None]
    return torch.view_as_real(turned).flatten(2)


def automatic(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.conv2d(x, torch.ones(8, 3, 3, 3)).float()


def deformed(x: torch.Tensor) -> torch.Tensor:
    return deform_conv2d(x, x.new_zeros(x.shape[0], 18, 6, 6), torch.ones(4, 3, 3, 3))


class Detector(SSD):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.head = nn.Identity()


class Suppressed(nn.Module):
    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = nms(boxes, scores, 0.5)
        return boxes[kept] if kept.sum() > 3 else boxes


def test_the_wrapper_in_the_docs_gives_what_comes_before_nms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/export.md").read_text(encoding="utf-8")
    (tmp_path / "heads.py").write_text(page.split("```python\n")[1].split("```")[0])
    with opened(f"{tmp_path / 'heads.py'}:Heads", None) as found, torch.no_grad():
        assert {name: value.ndim for name, value in found.module.eval()(torch.zeros(1, 3, 96, 96)).items()} == {
            "bbox_regression": 3,
            "cls_logits": 3,
        }
        whole = {name.removeprefix("model."): value for name, value in found.module.state_dict().items()}
        torch.save(whole, tmp_path / "whole.pth")
    with opened(f"{tmp_path / 'heads.py'}:Heads", tmp_path / "whole.pth") as found:
        assert found.weights == str(tmp_path / "whole.pth")


def test_torchvision_takes_arguments_and_never_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with opened("torchvision:lraspp_mobilenet_v3_large", None, {"num_classes": 3}) as found:
        assert found.module.classifier.low_classifier.out_channels == 3
        assert found.inputs[0].shape == ("batch", 3, 520, 520)
    with (
        pytest.raises(ModelError, match=r"downloads nothing.*`weights=FILE`"),
        opened("torchvision:lraspp_mobilenet_v3_large", None, {"weights_backbone": "DEFAULT"}),
    ):
        pass


FIXED: dict[str, Any] = {"inputs": {"x": (1, 3, 8, 8)}}
OPEN: dict[str, Any] = {"inputs": {"x": ("b", 3, 8, 8)}}


@pytest.mark.parametrize(
    ("source", "options", "word"),
    [
        ("torchvision:resnet5", {}, "resnet50"),
        ("no.such.module:make", {}, "isn't installed"),
        (f"{__name__}:nothing", {}, "has no 'nothing'"),
        (f"{__name__}:IMAGE", {}, "of type dict"),
        ("model.onnx", {}, "ONNX model already"),
        ("weights.pth", {}, "--weights"),
        ("program.pt2", {}, "program of torch.export"),
        ("model.h5", {}, "python -m tf2onnx.convert"),
        ("bert-base-uncased", {}, "from_pretrained of a local folder"),
        ("rapidocr-det", {}, "ONNX model already"),
        (Net(), {}, "`inputs="),
        (Net(), {"inputs": {"x": (0, 3)}}, "positive"),
        (Net(), {**FIXED, "opset": 99}, "16 to 23"),
        (Net(), {**FIXED, "weights": "none.pth"}, "none.pth"),
        (Net(), {**OPEN, "sample": "none.npz"}, "none.npz"),
        (Net(), {**OPEN, "sample": np.zeros((2, 3, 8, 9))}, "dimension 3 must be 8"),
        (Net(), {**OPEN, "sample": {"y": np.zeros((2, 3, 8, 8))}}, "'x'"),
        (Net(), {**FIXED, "tolerance": 0.1, "verify": False}, "`tolerance=` has no effect"),
        (Two(), {"inputs": {"a": (1, 3), "b": (1, 3)}, "preprocess": "imagenet"}, "`sample=` gives none"),
        (Net(), {**FIXED, "tolerance": float("nan")}, "`tolerance=` is nan"),
        (Net(), {**FIXED, "output_names": []}, "`output_names=` is []: give names"),
        (Net(), {"inputs": ["x:²x3x8x8"]}, "has '²'"),
        (Net(), {"inputs": {"x": torch.ones(2, 16)}}, "`inputs=` holds Tensor"),
        (Net(), {"inputs": {"x": 0.5}}, "`inputs=` holds float"),
        (Net(), {"inputs": [torch.ones(2, 16)]}, "a mapping of names to shapes"),
        (Net(), {"inputs": {"x": "batchx16"}}, "`inputs=` holds str"),
        (3, {}, "torch.nn.Module"),
        (Net(), {**FIXED, "factory_arg": {"a": 1}}, "ready module"),
        (Net(), {**FIXED, "output_names": ["a", "b"]}, "gives 1 output (output)"),
        (Two(), {"inputs": {"a": (1, 3)}}, "`inputs='b:"),
        (Two(), {}, "forward takes: a, b"),
        (Detector(), {"inputs": {"images": (1, 3, 64, 64)}}, "NMS"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "backbone"),
        ("torchvision:quantized_resnet18", {}, "torchvision:resnet18"),
        ("torchvision:resnet18", {"factory_arg": {"classes": 3}}, "'classes'"),
        ("torchvision:raft_small", {}, "image1, image2"),
        ("torchvision:r3d_18", {}, "its inputs' shapes aren't known"),
    ],
)
def test_wrong_requests(tmp_path: Path, source: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises((UsageError, DataError)) as caught:
        export(source, tmp_path / "m.onnx", **options)
    assert word in str(caught.value), caught.value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.torch.jit.s")
def test_weights_that_do_not_fit_or_are_not_safe(tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pth")
    torch.save(Net(), tmp_path / "whole.pth")
    (tmp_path / "text.pth").write_text("not weights")
    torch.jit.save(torch.jit.script(Two()), tmp_path / "script.pth")
    for name, word in (
        ("other.pth", "don't fit"),
        ("whole.pth", r"weights_only.*whole pickled model.*whole\.state\.pth"),
        ("text.pth", "can't be loaded"),
        ("script.pth", r"^(?!.*my_model).*are TorchScript: save them alone.*script\.state\.pth"),
    ):
        with warnings.catch_warnings(), pytest.raises(ModelError, match=f"(?s){word}"):
            warnings.simplefilter("error")
            export(Net(), tmp_path / "m.onnx", inputs={"x": (1, 3, 8, 8)}, weights=tmp_path / name)
    assert not (tmp_path / "m.onnx").exists()


def test_weights_inside_other_things_are_found_or_named(tmp_path: Path) -> None:
    state, path = Net().state_dict(), tmp_path / "w.pth"

    def taken(content: Any) -> ExportResult:
        torch.save(content, path)
        return export(Net(), tmp_path / "m.onnx", inputs={"x": (1, 3, 8, 8)}, weights=path, verify=False)

    assert taken({"params": state, "iter": 7}).weights == str(path)
    inside = {
        f"_orig_mod.{name.replace('.', '._checkpoint_wrapped_module._orig_mod.')}": value
        for name, value in state.items()
    }
    assert inside.keys().isdisjoint(state) and taken(inside).weights == str(path)
    found = taken({"model": state, "ema": state, "optimizer": {"state": {}}})
    assert f"of the state dicts in {path} 'model' is taken, not ema" in found.notes
    for content, said in (
        ({"params_ema": state, "params": state}, f"2 state dicts (params_ema, params): .*torch.load({str(path)!r})"),
        ({"epoch": 3, "loss": 0.5}, "hold no state dicts (epoch, loss): save"),
    ):
        with pytest.raises(ModelError) as caught:
            taken(content)
        for part in said.split(".*"):
            assert part in str(caught.value)


def test_an_unwritable_output_fails_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        export("no.such:thing", tmp_path / "missing" / "m.onnx")


def test_inputs_as_text() -> None:
    assert parse_input("input:batchx3x224x224") == TensorInfo("input", "float32", ("batch", 3, 224, 224))
    assert parse_input("ids:batch,max:long") == TensorInfo("ids", "int64", ("batch", "max"))
    assert parse_input("x:[batch, 3, 32, 32]:half") == TensorInfo("x", "float16", ("batch", 3, 32, 32))
    with pytest.raises(UsageError, match=r"has -1 for a size: .* such as x:batchx3x32x32"):
        parse_input("x:-1x3x32x32")
    for wrong in ("input", "input:", ":1x3", "input:0x3", "input:1x3:floot", "a:b:c:d"):
        with pytest.raises(UsageError):
            parse_input(wrong)


def test_a_torchvision_detector_is_exported_up_to_nms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(**_: Any) -> Any:
        backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 16, 1))
        backbone.out_channels = [8]  # type: ignore[assignment]
        anchors = DefaultBoxGenerator([[2]])
        return SSD(backbone, anchors, (64, 96), 5, image_mean=[0.5] * 3, image_std=[0.25] * 3)

    monkeypatch.setattr("torchvision.models.get_model_builder", lambda name: small)
    result = export("torchvision:ssd300_vgg16", tmp_path / "m.onnx")
    assert [(item.name, item.shape) for item in result.inputs] == [("images", ("batch", 3, 96, 64))]
    assert [item.name for item in result.outputs] == ["bbox_regression", "cls_logits"]
    assert result.verified and any("ends in NMS" in note and "96×64" in note for note in result.notes)
    source = open_source("torchvision:ssd300_vgg16", None)
    assert isinstance(source.preprocess, dict) and source.preprocess["mean"] == [0.5] * 3
    assert (source.preprocess["size"], source.preprocess["resize"]) == ([96, 64], "stretch")


class Masked(nn.Module):
    """As PyTorch's tutorials do it: the mask isn't said to be causal."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.body(source, target, tgt_mask=mask)


def test_a_state_has_the_batch_behind_its_layers(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {"input": ("batch", 5, 6), "hx": (2, "batch", 4)}
    result = export(nn.GRU(6, 4, num_layers=2, batch_first=True), tmp_path / "m.onnx", inputs=shapes)
    assert [item.batch for item in result.comparisons] == [1, 2]
    assert result.inputs[1].shape == (2, "batch", 4)


def test_the_causal_mask_of_torchs_transformer_is_exported(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {"source": ("batch", "s", 8), "target": ("batch", "t", 8)}
    before = torch.nn.modules.transformer._detect_is_causal_mask
    result = export(Masked(), tmp_path / "m.onnx", inputs=shapes)
    assert [dict(item.sizes) for item in result.comparisons[2:]] == [{"s": 16, "t": 16}, {"s": 9, "t": 9}]
    assert torch.nn.modules.transformer._detect_is_causal_mask is before


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((x.shape[0],), x.shape[1])
        return self.cell(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0][0]


class Remembering(nn.Module):
    """A mean that forward itself carries on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
        self.steps += 1
        return x - self.mean[:, None, None]


class Attending(nn.Module):
    """Causal attention with a mask besides (True: keep); a row that is masked as a whole has no defined result."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = causal[None, None] & keep[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)


class Picking(nn.Module):
    """Of boxes that name their image: another number of them than of images."""

    def forward(self, image: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return roi_align(image, boxes, (2, 2), 1.0, 2, True)


IMAGES: dict[str, Any] = {"x": ("batch", 3, 8, 8)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "inputs", "words"),
    [
        (
            lambda: Plain(lambda x: nn.functional.dropout(x, 0.5)),
            IMAGES,
            ["compute something random?", "training=self.training"],
        ),
        (lambda: Plain(lambda x: x["x"] * 2), {"x": ("n", 4)}, ["forward gets tensors alone"]),
        (Packing, {"x": ("n", 6, 4)}, ["packs sequences", "torch.gather"]),
        (Picking, {"image": (1, 3, 8, 8), "boxes": ("n", 5)}, ["which were made up? `sample=` gives real ones"]),
        (lambda: Plain(lambda x: (x * 4.0).bfloat16()), IMAGES, ["output is bfloat16", "return it in float32"]),
        (Remembering, IMAGES, ["another output for the same inputs", "an input and an output of forward"]),
        (lambda: Plain(rotated), {"x": ("n", 6, 4)}, ["complex numbers", "cosine and sine"]),
        (
            Attending,
            {"x": ("n", 5, 8), "keep": TensorInfo("keep", "bool", ("n", 5))},
            ["Made up of both 0 and 1 (keep)", "give real ones by `sample=`"],
        ),
        (lambda: Plain(lambda x: x.mode(1)[0]), {"x": ("n", 4)}, ["aten.mode", "no ONNX form"]),
        (
            lambda: Plain(lambda x: x * 2 if x.sum() > 0 else x),
            {"x": ("n", 6)},
            ["control flow", "test_exporter.py, line", "if x.sum() > 0"],
        ),
        (
            lambda: Plain(lambda x: x + torch.arange(12.0).reshape(2, 6)),
            {"x": ("batch", 6)},
            ["batch of x is always 2", "`inputs=`"],
        ),
        (lambda: Plain(broken), {"x": ("batch", 6)}, ["forward fails on x float32 [2, 6]", "x @ torch.ones(5, 5)"]),
        (Suppressed, {"boxes": (20, 4), "scores": (20,)}, ["test_exporter.py, line", "NMS", "docs/export.md", "guard"]),
        (lambda: Plain(automatic), {"x": ("batch", 3, 16, 16)}, ["torch.autocast", "leave that out"]),
        (lambda: Optionals(), None, ["`inputs='image:batchx3x224x224'`"]),
        (lambda: Plain(deformed), IMAGES, ["DeformConv", "a newer opset", "`opset=20`"]),
        (
            lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, torch.qint8),
            {"input": ("n", 8)},
            ["torch.ao", "float model"],
        ),
        (lambda: nn.Linear(4, 4).bfloat16(), {"input": ("n", 4)}, ["weights are bfloat16", "model.float()"]),
        (
            lambda: nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(4, 4))),
            {"input": ("n", 4)},
            ["holds TorchScript", "put the Python module there", "state_dict()"],
        ),
        (
            lambda: torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)),
            {"input": (2, 4)},
            ["`source=` is ExportedProgram", "torch.nn.Module is needed: its .module() is one"],
        ),
    ],
)
def test_common_modules_that_cannot_be_exported_say_what_to_do(
    make: Any, inputs: Any, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises((ModelError, UsageError)) as caught:
        export(make(), tmp_path / "m.onnx", inputs=inputs)
    assert all(word in str(caught.value) for word in words) and len(str(caught.value)) < 1000, caught.value
    assert list(tmp_path.iterdir()) == []


def test_what_real_inputs_make_of_forward_is_not_put_down_to_made_up_ones(tmp_path: Path) -> None:
    wide = {"x": np.ones((4, 7), np.float32)}
    with pytest.raises(
        ModelError, match=r"forward fails on x float32 \[4, 7\].*values, which were given \(arrays\)"
    ) as caught:
        export(Plain(broken), tmp_path / "m.onnx", inputs={"x": ("batch", 7)}, sample=wide)
    assert "`sample=`" not in str(caught.value)
    keep = np.arange(5) < np.array([[3], [5]])
    real = {"x": np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32), "keep": keep}
    inputs = {"x": ("n", 5, 8), "keep": TensorInfo("keep", "bool", ("n", 5))}
    assert export(Attending(), tmp_path / "m.onnx", inputs=inputs, sample=real).verified


def test_a_sample_of_inputs_that_share_no_first_axis(tmp_path: Path) -> None:
    boxes = np.array([[0, 0, 0, 4, 4], [0, 1, 1, 7, 7]], np.float32)
    np.savez(tmp_path / "s.npz", image=np.ones((1, 3, 8, 8), np.float32), boxes=boxes)
    shapes: dict[str, Any] = {"image": (1, 3, 8, 8), "boxes": ("n", 5)}
    result = export(Picking(), tmp_path / "m.onnx", inputs=shapes, sample=tmp_path / "s.npz")
    assert result.sample.endswith("s.npz") and result.outputs[0].shape[0] == "n"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, level: torch.Tensor, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * level + shift


@pytest.mark.parametrize(
    ("inputs", "sample"),
    [
        (["level:scalar", "x:batchx16", "shift:scalar:int64"], ""),
        (["level:scalar", "x:batchx16", "shift:scalar:int64"], "one.npz"),
        ({"level": (), "x": ("batch", 16), "shift": TensorInfo("shift", "int64", ())}, "each.npz"),
    ],
)
def test_inputs_that_are_single_numbers(tmp_path: Path, inputs: Any, sample: str) -> None:
    x = np.ones((5, 16), np.float32)
    np.savez(tmp_path / "one.npz", x=x, level=np.float32(0.5), shift=np.int64(3))
    np.savez(tmp_path / "each.npz", x=x, level=np.full(5, 0.5, np.float32), shift=np.full(5, 3))
    given = tmp_path / sample if sample else None
    result = export(Scaled(), tmp_path / "m.onnx", inputs=inputs, sample=given)
    assert [(info.name, info.shape, info.dtype) for info in result.inputs] == [
        ("level", (), "float32"),
        ("x", ("batch", 16), "float32"),
        ("shift", (), "int64"),
    ]
    assert [item.batch for item in result.comparisons] == [1, 5 if sample else 2]
    feed = {"level": np.asarray(2, np.float32), "x": np.zeros((3, 16), np.float32)}
    shifted, plain = (OnnxSession(tmp_path / "m.onnx")({**feed, "shift": np.asarray(shift)}) for shift in (7, 0))
    np.testing.assert_allclose(shifted["output"] - plain["output"], 7, rtol=1e-5)


@pytest.mark.parametrize("batch_first", [False, True])
def test_samples_of_a_transformer_are_found_without_names(tmp_path: Path, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first)
    export(nn.TransformerEncoder(layer, 2), tmp_path / "m.onnx", inputs="src:a,b,32")
    model = load_model(tmp_path / "m.onnx")
    assert [info.batch_axis for info in (*model.inputs, *model.outputs)] == [0 if batch_first else 1] * 2


class Messages(nn.Module):
    """A graph network: the first axis holds nodes, which edges name by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.norm = nn.Linear(4, 8), nn.BatchNorm2d(1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.near(x)[None, None])[0, 0]
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def test_a_first_axis_that_no_single_sample_fits(tmp_path: Path) -> None:
    inputs = {"x": TensorInfo("x", "float32", ("nodes", 4)), "edges": TensorInfo("edges", "int64", (2, "count"))}
    result = export(Messages(), tmp_path / "m.onnx", inputs=inputs)
    assert [(item.batch, dict(item.sizes)) for item in result.comparisons] == [
        (8, {}),
        (8, {"count": 16}),
        (8, {"count": 9}),
    ]
    (note,) = [note for note in result.notes if "not compared at batch 1" in note]
    assert "IndexError" in note


class Together(nn.Module):
    """Each sample of `left` with one of `right`, by a grouped convolution."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        kernels = right[:, :, :3, :3].reshape(-1, 1, 3, 3)
        return nn.functional.conv2d(left.reshape(1, -1, 8, 8), kernels, groups=kernels.shape[0])


def test_where_the_exporter_fails_on_open_sizes_fixed_ones_are_named(tmp_path: Path) -> None:
    inputs = dict.fromkeys(("left", "right"), ("batch", 3, 8, 8))
    with pytest.raises(ModelError, match=r"itself fails: try fixed sizes, `inputs='left:1x3x8x8'`"):
        export(Together(), tmp_path / "m.onnx", inputs=inputs)
    assert export(Together(), tmp_path / "m.onnx", inputs=dict.fromkeys(inputs, (1, 3, 8, 8))).verified


def test_nan_of_made_up_inputs_is_said(tmp_path: Path) -> None:
    root: dict[str, Any] = {"source": Plain(torch.sqrt), "inputs": {"x": ("batch", 6)}}
    made = export(output=tmp_path / "m.onnx", **root)
    assert any("PyTorch itself gives NaN in output on synthetic" in note and "`sample=`" in note for note in made.notes)
    made = export(output=tmp_path / "m.onnx", **root, sample={"x": np.ones((4, 6), np.float32)})
    assert not any("NaN" in note for note in made.notes)


class Optionals(nn.Module):
    def forward(self, image: Any = None, text: Any = None) -> Any:
        return image * 2
