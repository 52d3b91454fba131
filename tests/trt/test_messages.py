"""TensorRT's error texts, as observed, in our words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trtopt.core.errors import (
    BackendError,
    BuildFailed,
    DeviceError,
    EngineError,
    EngineMismatch,
    InvalidModel,
    TrtoptError,
    UnsupportedRequest,
)
from trtopt.trt.messages import Collector, Messages, in_words, tidy, translate

BUILD = "IBuilder::buildSerializedNetwork: Error Code 1: Myelin "


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            "Error Code 4: Internal Error (kOPT values for profile 0 violate shape constraints: IShuffleLayer /Reshape_4: …)",
            BuildFailed,
            "sizes in `shapes=` contradict each other",
        ),
        (
            "[weightsPtr.h::values::181] Error Code 2: Internal Error (Assertion type() == expectedDataType<T>() failed. )",
            BuildFailed,
            "does so where an INT8 convolution reads HardSwish",
        ),
        (
            f"{BUILD}([pass.cpp:337] Cannot compile operation 'fc' for Turing (SM75): FP32 GEMM is not supported.)",
            UnsupportedRequest,
            "node fc",
        ),
        (
            'Assertion failed: scaleAllPositive && "Scale coefficients must all be positive"',
            InvalidModel,
            "TensorRT 8.6 can't read FP16 scales",
        ),
        ("Unable to load library: libnvinfer_builder_resource_sm90.so.11.2.1", BackendError, "no kernels for this GPU"),
        ("CUDA initialization failure with error: 35", DeviceError, "needs a GPU"),
        ("Error Code 1: Cuda Runtime (In generateForCurrent … cudaError 35…)", DeviceError, "needs a GPU"),
        (
            "Version tag does not match. Note: Current Version: 213, Serialized Engine Version: 205",
            EngineMismatch,
            "another",
        ),
    ],
)
def test_known_texts(text: str, kind: type[TrtoptError], said: str) -> None:
    error = translate(("a line before", text), "TensorRT can't build m.onnx")
    assert type(error) is kind
    assert said in str(error) and str(error).startswith("TensorRT can't build m.onnx: ")
    assert tidy(text)[:60] in str(error)  # the original stays readable


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "ModelImporter.cpp:151: ERROR: x:992 In function importInput:\n[8] Assertion failed: convertDtype(a, &b)",
            "Assertion failed: convertDtype(a, &b)",
        ),
        (
            "ITensor::getDimensions: Error Code 4: API Usage Error (PRelu_2: slope In validate at /_src/optimizer/a.cpp:57)",
            "ITensor::getDimensions: Error Code 4: API Usage Error (PRelu_2: slope)",
        ),
        ("a [checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In init at /_src/x.h:12)", "a"),
        (
            "[tacticSupply.cpp::getSupportedFormats::48] Error Code 2: nms has no runners",
            "Error Code 2: nms has no runners",
        ),
    ],
)
def test_places_in_tensorrts_source_are_left_out(text: str, left: str) -> None:
    assert tidy(text) == left


def test_unknown_texts_are_quoted() -> None:
    assert type(translate(("strange",), "can't build")) is BuildFailed
    assert str(translate(("one\n two", "three"), "can't load", EngineError)) == "can't load: one two; three"
    assert "no message" in str(translate((), "can't build"))
    assert in_words("strange") == "" and "an input that isn't of integers" in in_words("isInFlight")
    assert str(translate(tuple("abcdefgh"), "can't build")) == "can't build: a; b; c; d; e; f"
    long = str(translate(("isInFlight " + "x" * 999,), "can't build"))
    assert long.endswith(f"of integers (TensorRT said: isInFlight {'x' * 589})")


def test_steps_and_layers_are_told_apart_from_other_verbose_messages() -> None:
    steps: list[str] = []
    messages = Messages(steps.append)
    for text in ("Timing Runner: conv_1 (CaskConvolution[0x8])", "Layers: {}", "Tactic: 0x1 Time: 0.1", " Layers: "):
        messages.add("VERBOSE", text)
    messages.add("INTERNAL_ERROR", " it broke\n")
    assert (steps, messages.layers, messages.warnings) == (["timing conv_1"], ["Layers: {}"], ())
    assert messages.errors == ("it broke",)


WARNINGS = """
ModelImporter.cpp:1071: Empty initializer roi.
b
b
Make sure input sizes has Int64 binding.
Make sure output classes has Int64 binding.
Missing scale and zero-point for tensor x
Missing scale and zero-point for tensor y
Tactic Device request: 8193MB Available: 4096MB. Device memory is insufficient to use tactic.
UNSUPPORTED_STATE: Skipping tactic 3 due to insufficient memory on requested size of 8591507456 detected for tactic 0x1.
"""


def test_warnings_are_counted_and_errors_kept_in_order() -> None:
    messages = Messages()
    for text in WARNINGS.strip().splitlines():
        messages.add("WARNING", text)
    for text in ("first", "second", "first"):
        messages.add("ERROR", text)
    messages.add("INFO", "nothing")
    messages.add("INFO", "Some tactics do not have sufficient workspace memory to run. Increasing workspace size")
    unscaled = "tensors without a calibrated scale stay in floating point (2 times)"
    *counted, memory = messages.warnings
    assert counted == ["Empty initializer roi.", "b (2 times)", unscaled]  # bindings say nothing
    assert "`workspace=`" in memory and memory.endswith("(3 times)")
    assert messages.errors == ("first", "second")


@pytest.mark.parametrize("wanted", ["", "1"])
def test_verbose_shows_messages_but_not_the_verbose_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: str
) -> None:
    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

        def __init__(self) -> None:
            self.begun = True  # TensorRT's own takes no logger whose base wasn't initialized

    monkeypatch.setenv("TRTOPT_DEBUG", wanted)
    collector, heard = Collector(SimpleNamespace(ILogger=ILogger)), list[tuple[str, str]]()
    logger = collector.logger
    with collector.collecting(listener=lambda *said: heard.append(said)) as messages:
        logger.log(ILogger.VERBOSE, "within")
    logger.log(ILogger.VERBOSE, "later")
    assert heard == [("VERBOSE", "within")] and messages.errors == ()
    assert logger.begun
    logger.log(ILogger.INFO, "building\x1b[2J\n")
    logger.log(ILogger.VERBOSE, "a tactic")
    assert capsys.readouterr() == ("", "TensorRT info: building\\x1b[2J\n" if wanted else "")
