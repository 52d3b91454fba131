"""Commands of trtexec as trtopt's. Nothing of them is run.

Options are as 8.6 to 11 list them; what 10 and 11 dropped is from NVIDIA's migration pages.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.core.errors import UsageError
from trtopt.core.files import whole
from trtopt.core.shapes import parse_profile
from trtopt.core.values import x

_VALUES = {
    "ampere+": "ampere_plus",
    "sameComputeCapability": "same_compute_capability",
    "enable": "keep",
    "force": "prune",
}
IMAGES = ("--images", "DIR", "--preprocess", "PRESET")
_PROGRAMS = ("trtexec", "tensorrt_rtx")


def _rows() -> dict[str, tuple[str, str, str, str]]:
    """The rows of old_options.md by option: the TensorRT without it, what it becomes, with which words, and what is said."""
    rows = dict[str, tuple[str, str, str, str]]()
    table = whole(Path(__file__).with_name("old_options.md")).decode().partition("|---|\n")[2]
    for line in table.splitlines():
        names, gone, becomes, words, said = (part.strip() for part in line.strip("|").split("|"))
        rows |= dict.fromkeys(names.split(), (gone and f"TensorRT {gone}", becomes, words, said))
    return rows


OPTIONS = _rows()
wrapped = functools.partial(  # into lines for a terminal; commands in them stay whole
    textwrap.wrap, width=80, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
)


@dataclass(frozen=True)
class Replacement:
    """An option of the old way, such as "--fp16"; the first TensorRT without it, such as "TensorRT 11" ("": all have it);
    trtopt's way, or why there is none, and whether trtopt has nothing for it."""

    what: str
    gone: str
    instead: str
    lacking: bool


@dataclass(frozen=True)
class Migration:
    """The counterpart of a command: trtopt's, in the order to type them, and options that are replaced."""

    source: str
    commands: tuple[str, ...]
    replaced: tuple[Replacement, ...]

    @property
    def ok(self) -> bool:
        """Everything in it works on TensorRT 11, too, and has its counterpart."""
        return not any(item.gone or item.lacking for item in self.replaced)

    @property
    def lines(self) -> Iterator[str]:
        """Lines for a terminal."""
        if self.commands:
            yield "with trtopt:"
        for command in self.commands:
            yield f"    $ {command}"
        if self.commands and self.replaced:
            yield ""
        for item in self.replaced:
            yield from wrapped(f"{item.what}{f' (gone in {item.gone})' if item.gone else ''}")
            yield from wrapped(f"{'no equivalent: ' * item.lacking}{item.instead}", initial_indent="    ")


def migrated(source: str) -> Migration:
    """Translate a command; UsageError where it is another program's, can't be read, or is a file."""
    text = source.strip()
    # pathlib's is_file raises for a long command, which is no name of a file
    if "\n" not in text and (os.path.isfile(text) or re.fullmatch(r"\S+\.(py|sh|bash)", text)):  # noqa: PTH113
        raise UsageError(
            f"`migrate=` {text} is a script; give one command of it in quotes: grep -E 'trtexec|polygraphy' "
            f"{shlex.quote(text)} lists them. docs/manual/from-calibrators.md has what went from TensorRT's Python"
        )
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"`migrate=` {text!r} can't be read as a command: {error}") from None
    before = re.compile(r"\w+=.*|sudo|time|env|exec").fullmatch
    program, *arguments = itertools.dropwhile(before, [*words, ""])
    if Path(program).name.removesuffix(".exe") not in _PROGRAMS:
        raise UsageError(
            f"`migrate=` {text!r} is no command of trtexec: give the whole command in quotes, such as 'trtexec "
            "--onnx=model.onnx --fp16'; docs/manual/from-polygraphy.md has Polygraphy's"
        )
    draft = _Draft()
    for argument in arguments[:-1]:
        name, _, value = argument.partition("=")
        if argument.startswith("-"):
            draft.take(name.lstrip("-"), f"--{name.lstrip('-')}", value)
        else:
            draft.say(argument, "it is no option of trtexec: values follow a '='", lacking=True)
    commands = draft.built() if draft.model or draft.engine else []
    if not commands:
        draft.say("trtexec", "it names neither --onnx nor --loadEngine", lacking=True)
    return Migration(text, tuple(commands), tuple(draft.replaced))


@dataclass
class _Draft:
    """Commands of trtopt that are being written."""

    model: str = ""
    engine: str = ""
    build: list[str] = field(default_factory=list)
    bench: list[str] = field(default_factory=list)
    precisions: set[str] = field(default_factory=set)
    cache: str = ""
    profiles: list[dict[str, str]] = field(default_factory=lambda: [{}])  # "min", "opt", "max" → spec
    fed: str = ""  # the only profile, too, where no range is given
    running: str = "yes"
    replaced: list[Replacement] = field(default_factory=list)

    def take(self, name: str, what: str, value: str) -> None:
        if name not in OPTIONS:
            self.say(what, "trtopt has nothing for it", lacking=True)
        if name not in OPTIONS or value == "disable":  # of --sparsity, as it is by itself
            return
        gone, action, counterpart, said = OPTIONS[name]
        value = _VALUES.get(value, value.replace("'", ""))
        words = [word.replace("{}", value) for word in counterpart.split()]
        for place in (self.build,) * ("build" in action) + (self.bench,) * ("bench" in action):
            place += [] if words[:1] and words[0] in place else words  # two options may have one counterpart
        match action:
            case "set":
                for name, _, text in (word.partition("=") for word in words):
                    setattr(self, name, text)
            case "precision":
                self.precisions.add(counterpart)
            case "min" | "opt" | "max":
                self.profiles[-1][action] = value
            case "profile":
                self.profiles += [{}] if self.profiles[-1] else []
            case "fed":
                self.fed = value
                for ranges in parse_profile(value).values():
                    self.bench += ["--batch", str(ranges.opt[0])] if ranges.opt and "--batch" not in self.bench else []
            case "layers" | "pools":
                self._parts(what, value, action == "layers")
        if said:
            self.say(what, said.replace("{}", value), gone, action == "none")

    def say(self, what: str, instead: str, gone: str = "", lacking: bool = False) -> None:
        self.replaced.append(Replacement(what, gone, instead, lacking))

    def built(self) -> list[str]:
        if self.engine and not self.model:
            self.say(self.engine, "a plan of another tool has no manifest: add --trust, if you know where it is from")
        self.engine = self.engine or str(Path(self.model or "MODEL").with_suffix(".engine"))
        lines = []
        if self.model:
            words = [*self._precision(), *self._shapes()]
            fits = words[:1] in (["--fp16"], ["--int8"]) and not {"--calib", "--int4"} & {*words, *self.build}
            if "prune" in self.build and not fits:
                instead = "trtopt prunes for --fp16 alone, or for --int8 by the samples that it calibrates on"
                self._leave("--sparsity=force", ["--sparsity", "prune"], instead)
            if "--int4" in self.build and words[:1] in (["--best"], ["--int8"], ["--fp8"]):
                self._leave("--int4", ["--int4"], f"it is for FP16 or BF16 alone, and {words[0]} is asked for, too")
            words += self.build
            lines.append(["trtopt", "build", self.model, *words, "-o", self.engine])
        if self.running:
            lines.append(["trtopt", "bench", self.engine, *self.bench])
        return list(map(shlex.join, lines))

    def _leave(self, what: str, words: Sequence[str], why: str) -> None:
        self.build = [word for word in self.build if word not in words]
        self.say(what, why, lacking=True)

    def _precision(self) -> list[str]:
        name = next((name for name in ("best", "int8", "fp8", "fp16", "bf16") if name in self.precisions), "")
        words = [f"--{name}"] if name else []
        if name in ("best", "int8", "fp8"):
            words += ["--bf16"] if name != "best" and {"bf16", "fp16"} & self.precisions == {"bf16"} else []
            cache = self.cache if name != "best" else ""  # it is read in place of data
            words += ["--calib", cache] if cache else IMAGES
        return words

    def _shapes(self) -> Iterator[str]:
        for specs in [profile for profile in self.profiles if profile] or [{"opt": self.fed}] * bool(self.fed):
            one = specs.get("opt") or next(iter(specs.values()))
            ranges = [parse_profile(specs.get(which, one)) for which in ("min", "opt", "max")]
            texts = []
            for name in ranges[1]:
                dims = [x(range_.get(name, ranges[1][name]).opt) for range_ in ranges]
                texts.append(f"{name}:{dims[0] if len(set(dims)) == 1 else ','.join(dims)}")
            yield from ("--shapes", ";".join(texts))

    def _parts(self, what: str, value: str, layers: bool) -> None:
        """Translate a list of NODE:PRECISION or of POOL:SIZE."""
        for part in filter(None, value.split(",")):
            name, _, text = part.rpartition(":")
            precision = {"float32": "fp32", "float16": "fp16"}.get(text, text)
            size = re.fullmatch(r"([\d.]+)([BKMG]?)(?:iB)?", text)
            if layers and precision in ("fp32", "fp16", "bf16", "int8", "fp8"):
                self.build += ["--precision-override", f"{name}={precision}"]
            elif not layers and name == "workspace" and size:
                self.build += ["--workspace", size[1] + {"B": "", "K": "KiB", "G": "GiB"}.get(size[2], "MiB")]
            else:
                pools = "trtopt sets no memory pool but the workspace; it has no DLA"
                self.say(f"{what}={part}", f"trtopt builds no layer in {precision}" if layers else pools, lacking=True)
