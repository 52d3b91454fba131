"""trtopt's commands that take an old one's place, while they are written, and what single options add to them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.core.shapes import parse_profile
from trtopt.core.values import x

IMAGES = ("--images", "DIR", "--preprocess", "PRESET")
UNKNOWN = "trtopt has nothing for it"
PLUGINS = "trtopt loads no plugins; trtopt check MODEL.onnx names the operators that need one"


@dataclass(frozen=True)
class Option:
    """An option of a command, as it was found.

    Attributes:
        what: as it was written, such as "--fp16".
        gone: the first TensorRT whose trtexec is without it, such as 11; 0: all have it.
        instead: trtopt's way, or why there is none.
        lacking: trtopt has nothing for it.
    """

    what: str
    gone: int
    instead: str
    lacking: bool = False


@dataclass
class Draft:
    """Commands of trtopt that are being written."""

    model: str = ""
    engine: str = ""
    build: list[str] = field(default_factory=list)
    bench: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    output: str = ""
    precisions: set[str] = field(default_factory=set)
    cache: str = ""
    data: str = ""
    profiles: list[dict[str, str]] = field(default_factory=lambda: [{}])  # "min", "opt", "max" → spec
    building: bool = True
    running: bool = True
    inspecting: bool = False
    options: list[Option] = field(default_factory=list)

    def say(self, what: str, instead: str, gone: int = 0, lacking: bool = False) -> None:
        self.options.append(Option(what, gone, instead, lacking))

    def lack(self, what: str, why: str, gone: int = 0) -> None:
        self.say(what, why, gone, True)

    def words(self) -> list[str]:
        """Of `trtopt build`: precision, scales and shapes, then the rest."""
        words = []
        precisions = self.precisions
        if "best" in precisions:
            words.append("--best")
        elif quantized_types := precisions & {"int8", "fp8"}:
            words.append(f"--{sorted(quantized_types, reverse=True)[0]}")
            words += ["--bf16"] if "bf16" in precisions and "fp16" not in precisions else []
        else:
            words += [f"--{name}" for name in ("fp16", "bf16") if name in precisions][:1]
        if precisions & {"int8", "fp8", "best"}:
            if self.cache and "best" not in precisions:  # it is read in place of data
                words += ["--calib", self.cache]
            else:
                words += ["--data", self.data] if self.data else IMAGES
        for profile in self.profiles:
            text = self._profile(profile)
            words += ["--shapes", text] if text else []
        return [*words, *self.build]

    def _profile(self, specs: Mapping[str, str]) -> str:
        if not specs:
            return ""
        one = specs.get("opt") or next(iter(specs.values()))
        ranges = {which: parse_profile(specs.get(which, one)) for which in ("min", "opt", "max")}
        texts = []
        for name in ranges["opt"]:
            shapes = [ranges[which].get(name, ranges["opt"][name]).opt for which in ("min", "opt", "max")]
            dims = [x(shape) for shape in shapes]
            texts.append(f"{name}:{dims[0] if len(set(dims)) == 1 else ','.join(dims)}")
        return ";".join(texts)

    def commands(self) -> list[str]:
        engine = self.engine or (with_suffix(self.model, ".engine") if self.model else "MODEL.engine")
        lines = []
        if self.engine and not self.model:
            self.say(
                self.engine,
                "a plan that trtopt didn't build has no manifest: add --trust, if you know where it is from",
            )
        if self.model and self.building:
            lines.append(["trtopt", "build", self.model, *self.words(), "-o", engine])
        if self.inspecting:
            lines.append(["trtopt", "inspect", engine])
        if self.inputs or self.output:
            output = ["-o", self.output] if self.output else []
            inputs = self.inputs or ["X.npy"]
            lines.append(["trtopt", "run", engine, *(word for item in inputs for word in ("--input", item)), *output])
        elif self.running:
            lines.append(["trtopt", "bench", engine, *self.bench])
        return list(map(shlex.join, lines))


def with_suffix(name: str, suffix: str) -> str:
    """A file's name with another suffix."""
    path = Path(name)
    return str(path.with_suffix(suffix)) if path.name else f"OUT{suffix}"


# What an option does --------------------------------------------------------------------------------------------------

Handler = Callable[[Draft, str, str], None]  # what the option is called, its value


def precision(name: str) -> Handler:
    def handle(draft: Draft, what: str, value: str) -> None:
        draft.precisions.add(name)
        instead = f"trtopt build --{name}"
        if name in ("int8", "fp8", "best"):
            instead += ", with scales from --images, --data or --calib"
        draft.say(what, instead, gone=11)

    return handle


def switch(*words: str) -> Handler:
    return lambda draft, what, value: draft.build.extend(words)


def valued(flag: str) -> Handler:
    return lambda draft, what, value: draft.build.extend([flag, value])


def nothing(why: str, gone: int = 0) -> Handler:
    return lambda draft, what, value: draft.say(what, why, gone)


def lacks(why: str, gone: int = 0) -> Handler:
    return lambda draft, what, value: draft.lack(what, why, gone)


def layer_precisions(draft: Draft, what: str, value: str) -> None:
    for part in filter(None, value.split(",")):
        node, _, precision = part.rpartition(":")
        precision = {"float32": "fp32", "float16": "fp16"}.get(precision, precision)
        if precision in ("fp32", "fp16", "bf16", "int8", "fp8"):
            draft.build += ["--precision-override", f"{node}={precision}"]
        else:
            draft.lack(f"{what}={part}", f"trtopt builds no layer in {precision}")
    instead = "trtopt build --precision-override NODE=PRECISION; trtopt check MODEL.onnx --nodes lists the names"
    draft.say(what, instead, gone=11)


def calibration_cache(draft: Draft, what: str, value: str) -> None:
    draft.cache = value
    draft.say(what, f"trtopt build --calib {value}: the cache as it is, on every generation", gone=11)
