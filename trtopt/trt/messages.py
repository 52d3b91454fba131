"""TensorRT's own messages: collected, never printed raw; warnings counted, known errors put in our words."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trtopt.core.errors import (
    BackendError,
    BuildFailed,
    DeviceError,
    EngineMismatch,
    InvalidModel,
    TrtoptError,
    UnsupportedOperator,
    UnsupportedRequest,
)
from trtopt.core.library_output import wanted

_LAYERS = "Layers:"
_TIMING = re.compile(r"Timing Runner: (.+?) \(")
_TOO_LITTLE = re.compile(  # a kernel needed more scratch memory than there was, and was left out
    r"Device request: ?\d+ ?MB|insufficient memory on requested size of|sufficient workspace memory to run"
)
_LEFT_OUT = "kernels were left out for want of scratch memory; raise or drop `workspace=`, or free the GPU"

# Warnings that come once per weight or node: one line each, with a count. None drops one that says nothing alone.
_SUMMARIES: tuple[tuple[str, str | None], ...] = (
    (r"encountered issues when converting weights", None),
    (r"If this is not the desired behavior, please modify the weights", None),
    (r"logger passed into .* differs", None),
    (
        r"had the following issues when converted|Values less than smallest positive|[Ss]ubnormal",
        "weights too small for FP16 (subnormal or zero there)",
    ),
    (r"Check verbose logs for the list of affected weights", None),
    (r"generated with INT64 weights", "INT64 weights were cast to INT32"),
    (r"outside (the )?range of INT32|out of range for INT32", "INT64 weights beyond INT32 were clamped"),
    (r"Missing scale and zero-point for tensor", "tensors without a calibrated scale stay in floating point"),
    (
        r"Profile kM(IN|AX) values are not self-consistent",
        "the model's own shapes don't fit together at every size within `shapes=`: run it at the least and the largest",
    ),
    (r"Make sure (input|output) .* has Int64 binding", None),  # every integer input and output has one
    (r"Cache result detected as invalid", None),  # of a kept timing cache, for a kernel that is timed again then
    (r"Converting conv \w+ scales to fp32", None),  # TensorRT-RTX, on every Q/DQ with FP16 scales; it changes nothing
)


class Messages:
    """One operation's messages: warnings, errors, and the layer dump that TensorRT-RTX writes at VERBOSE."""

    def __init__(
        self, on_step: Callable[[str], None] | None = None, listener: Callable[[str, str], None] | None = None
    ) -> None:
        self._heard = listener
        self._problems: dict[str, None] = {}
        self._counts: dict[str, int] = {}
        self.layers: list[str] = []
        self._on_step = on_step

    def add(self, severity: str, text: str) -> None:
        """Take one message; called from TensorRT's threads, so it must never raise."""
        if self._heard is not None:
            self._heard(severity, text)
        if severity == "VERBOSE":
            if text.startswith(_LAYERS):
                self.layers.append(text)
            elif self._on_step and (match := _TIMING.search(text)):
                self._on_step(f"timing {match[1]}")
        elif _TOO_LITTLE.search(text):
            self._counts[_LEFT_OUT] = self._counts.get(_LEFT_OUT, 0) + 1
        elif severity in ("ERROR", "INTERNAL_ERROR"):
            self._problems[text.strip()] = None
        elif severity == "WARNING":
            own = " ".join(re.sub(r"^\w+\.cpp:\d+: ", "", text.strip()).split())
            if line := next((line for pattern, line in _SUMMARIES if re.search(pattern, text)), own):
                self._counts[line] = self._counts.get(line, 0) + 1

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(self._problems)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{line} ({count} times)" if count > 1 else line for line, count in self._counts.items())


class Collector:
    """The one logger of a TensorRT module, kept for the life of the process.

    TensorRT remembers the first logger that it is given and goes on using it for later builders: a logger per build
    would lose messages, or be called after its end.
    """

    def __init__(self, trt: Any) -> None:
        self._sinks: list[Messages] = []
        names = {getattr(trt.ILogger, name): name for name in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")}
        sinks = self._sinks

        class Logger(trt.ILogger):  # type: ignore[misc]
            def log(self, severity: Any, msg: str) -> None:
                name = names.get(severity, "INFO")
                if name != "VERBOSE" and wanted():
                    with contextlib.suppress(Exception):  # a closed stderr; TensorRT's threads must see no error
                        print(f"TensorRT {name.lower()}: {ascii(msg.strip())[1:-1]}", file=sys.stderr)
                for sink in tuple(sinks):
                    sink.add(name, msg)

        self.logger = Logger()

    @contextlib.contextmanager
    def collecting(
        self, on_step: Callable[[str], None] | None = None, listener: Callable[[str, str], None] | None = None
    ) -> Iterator[Messages]:
        """Messages from now on; each is also given to `listener`, which mustn't raise."""
        messages = Messages(on_step, listener)
        self._sinks.append(messages)
        try:
            yield messages
        finally:
            self._sinks.remove(messages)


# What only TensorRT's authors can use: where in its source a message was written, and by which check.
_NOISE = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[?\bcheckMacros\.cpp::\w+::\d+\]? ?Error Code \d+: Cuda Runtime \([^)]*\)?",
        r"\bIn (?:function )?[\w:~<>]+ at \S+:\d+",
        r"\[?\w+\.(?:cpp|h)::\w+::\d+\]",
        r"\[?\b\w+\.(?:cpp|h):\d+(?:: ?\w+\]|\]|:)? ?(?:ERROR: )?(?:\w+:\d+ In function \w+:)?",
        r"\(?/_src/\S+",
        r"\[\d+\] (?=Assertion)",
        r"\bIBuilder::buildSerializedNetwork: ",
    )
)


def tidy(text: str) -> str:
    """A message of TensorRT's on one line, without the places in its own source."""
    line = " ".join(text.split())
    for pattern in _NOISE:
        line = pattern.sub("", line)
    line = re.sub(r"\s+([.,;:)])", r"\1", " ".join(line.split()))
    return re.sub(r"(?:[;:,]\s*)+$", "", line).strip()


# Known error texts by the class of ours that they mean, the first match wins: pattern, our words ({0} and {1} are its groups).
_KNOWN: dict[type[TrtoptError], dict[str, str]] = {
    UnsupportedRequest: {
        r"Cannot compile operation '([^']*)' for Turing \(SM75\): FP32 GEMM is not supported": (
            "TensorRT-RTX has no FP32 matrix product for sm75 (node {0}): drop sm75 from `target=`, or build with `fp16=True`"
        )
    },
    InvalidModel: {
        r"scaleAllPositive": (
            "a quantization scale isn't a positive FP32 number: quantize in FP32 types (TensorRT 8.6 can't read FP16 scales)"
        )
    },
    UnsupportedOperator: {
        r"(\S+) has no runners that implement it|Could not find any implementation for node (.+?)(?:\.\)|\. |\.?$)": (
            "TensorRT parses {0} but has no implementation for its types and shapes; if `workspace=` is given, raise it"
        ),
        r"isInFlight": "sizes come of the values of an input that isn't of integers",
        r"trainingMode": "it computes as in training, with values drawn or averaged anew",
        r"legalUINT8|UINT8.* not supported": (
            "TensorRT takes uint8 for a network's inputs and outputs and casts of them only: cast to float32 first"
        ),
        r"mode == \"none\".*(ScatterND|ScatterElements)": "TensorRT has {0} without a reduction only",
    },
    BackendError: {
        r"Unable to (?:load|open) library:? (\S+?)[.:]?(?:\s|$)": (
            "its library {0} can't be loaded: it isn't in this package of TensorRT, or has no kernels for this GPU "
            "(`trtopt doctor` says which package is installed)"
        )
    },
    DeviceError: {
        r"cudaError 35|CUDA initialization failure with error|factory function returned nullptr|no CUDA-capable device": (
            "this needs a GPU, and CUDA can use none here"
        )
    },
    BuildFailed: {
        r"no tactics to implement the operation within workspace limit": (
            "the workspace is too small for at least one layer: raise or drop `workspace=`"
        ),
        r"values for profile \d+ violate shape constraints|dimensions must be|output cannot be negative": (
            "sizes in `shapes=` contradict each other, or what the model holds, as traces do; `trtopt check` proposes some"
        ),
        r"[Oo]ut ?[Oo]f ?[Mm]emory|Requested amount of GPU memory": (
            "the GPU ran out of memory: use smaller `shapes=` or a smaller `workspace=`, or free the GPU"
        ),
        r"type\(\) == expectedDataType": (
            "10.6 does so where an INT8 convolution reads HardSwish, squeeze-and-excite, GELU, SiLU or ELU through Q/DQ: give "
            "the model without Q/DQ to `int8=True`, which leaves such layers out or keeps scales beside the graph, or use "
            "`fp16=True`"
        ),
    },
    EngineMismatch: {
        r"Unexpected call to stub": (
            "the lean runtime runs version-compatible plans only: build it with `version_compatible=True`"
        ),
        r"(?i)(?:version|magic) tag does not match|serialization version|version mismatch|plan file is not compatible"
        r"|newer plan|Engine Version Forward Compatibility": (
            "the plan was made by another TensorRT or for another GPU (`trtopt inspect` says what runs it)"
        ),
    },
}


def in_words(text: str) -> str:
    """Say what a message of TensorRT's means; empty where we don't know it."""
    return next((words for _, words, _ in _known([" ".join(text.split())])), "")


def translate(errors: tuple[str, ...], failure: str, default: type[TrtoptError] = BuildFailed) -> TrtoptError:
    """The error of ours that TensorRT's messages mean; unknown ones are quoted in `default`."""
    lines = [" ".join(text.split()) for text in errors]
    for kind, words, line in _known(lines):
        return kind(f"{failure}: {words} (TensorRT said: {tidy(line)[:600]})")
    return default(f"{failure}: {'; '.join(filter(None, map(tidy, lines[:6]))) or 'TensorRT gave no message'}")


def _known(lines: Sequence[str]) -> Iterator[tuple[type[TrtoptError], str, str]]:
    """Yield what is known of messages, one line each: the error, our words, the message."""
    for kind, texts in _KNOWN.items():
        for pattern, words in texts.items():
            for line in lines:
                if match := re.search(pattern, line):
                    groups = [group for group in match.groups() if group] + ["", ""]
                    yield kind, words.replace("{0}", groups[0]).replace("{1}", groups[1]), line
