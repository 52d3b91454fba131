"""Values of requests, checked when it is made."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from trtopt.core.errors import UsageError
from trtopt.core.values import (
    BuildSpec,
    Override,
    Precision,
    ShapeRange,
    overriding,
    parse_seconds,
    parse_size,
    parse_targets,
)


def test_targets_are_read_in_order_without_repeats() -> None:
    assert parse_targets("sm89,SM_120, 86,sm89") == (89, 120, 86)
    assert parse_targets(["sm80,sm86", "sm89"]) == (80, 86, 89)
    assert parse_targets("8.9,12.0,sm_120") == (89, 120)  # as NVIDIA's tables have them
    assert parse_targets(89) == (89,) and parse_targets([80, "sm89,sm120"]) == (80, 89, 120) and parse_targets(()) == ()
    with pytest.raises(UsageError, match=r"'turing'.*sm89"):
        parse_targets("turing")
    with pytest.raises(UsageError, match=r"'8\.96'.*sm89"):
        parse_targets("8.96")


def refused(number: float | None, said: str) -> contextlib.AbstractContextManager[Any]:
    return pytest.raises(UsageError, match=said) if number is None else contextlib.nullcontext()


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5G", 3 << 29), (4096, 4096), ("7b", 7)]
    + [(text, None) for text in ("", "GiB", "-1G", "2 boxes")],
)
def test_sizes(text: str | int, size: int | None) -> None:
    with refused(size, "isn't a size"):
        assert parse_size(text, "a size") == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2ms", 0.002), (" 500 us", 0.0005), ("0.5s", 0.5), (3, 3.0), (0.25, 0.25), (0, 0.0)]
    + [(no, None) for no in ("2", "2m", "-1ms", "ms", "1e3s", "", -0.1, float("inf"), float("nan"), True, None)],
)
def test_times(text: Any, seconds: float | None) -> None:
    with refused(seconds, r"max_delay is .*such as 2ms"):
        assert parse_seconds(text, "max_delay") == pytest.approx(seconds, abs=0)


def test_overrides_match_names_by_pattern_and_operators_whole() -> None:
    override = Override.parse("block*/conv=fp32")
    assert override.matches("block1/conv", "Conv")
    assert not override.matches("head/conv", "Conv")
    assert Override.parse("Conv=fp16").matches("anything", "Conv")
    assert not Override.parse("Con=fp16").matches("anything", "Conv")
    both = [Override.parse("Conv=fp16"), Override.parse("stem=fp32")]
    assert overriding(both, "stem", "Conv") is Precision.FP32
    assert overriding(both, "other", "Conv") is Precision.FP16
    assert overriding(both, "other", "Gemm") is None


@pytest.mark.parametrize("text", ["conv", "=fp32", "conv=", "conv=int4"])
def test_overrides_that_can_not_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="PATTERN=fp32"):
        Override.parse(text)


def test_a_build_spec_is_plain_json() -> None:
    spec = BuildSpec(precision=Precision.INT8, targets=(89,), profiles=({"x": ShapeRange.parse("1x3,2x3,4x3")},))
    plain = json.loads(json.dumps(spec.describe()))
    assert plain["precision"] == "int8"
    assert plain["targets"] == ["sm89"]
    assert plain["profiles"] == [{"x": "1x3,2x3,4x3"}]
    assert spec.base is Precision.FP16
    assert BuildSpec(precision=Precision.BF16).base is Precision.BF16
