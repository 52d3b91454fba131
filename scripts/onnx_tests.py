"""The ONNX project's own backend tests (in the `onnx` package), put through trtopt.

    scripts/onnx_tests                       every stage; some 40 minutes on two cores; prints counts and what is wrong
    scripts/onnx_tests --only attention      models whose name matches
    scripts/onnx_tests --stages fold,fp16    some stages alone

Each model is tried as it is ("plain") and with all inputs but the first made constants ("const"). Stages: raw (TensorRT-RTX's
parser and builder alone), check (with --fix), fold, fp16 (typing), build and build16. Processes take models from a queue; one
that a model ends is counted, and replaced. Exit status 1 if something is wrong that the project promises.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
VARIANTS = ("plain", "const")
STAGES = ("raw", "check", "fold", "fp16", "build", "build16")
TIMEOUT = 300.0  # seconds for one model
CLOSE, HALF = 1e-3, 2e-2  # relative and absolute: folding rounds differently, FP16 rounds
# Results that FP16 changes though the graph is right: values past 65504, and codes next to each other.
ROUNDED = ("test_dequantizelinear_e5m2", "test_dynamicquantizelinear_expanded", "test_quantizelinear_uint16")
ROUNDED += ("test_quantizelinear_int16", "test_quantizelinear_e5m2")
RANDOM = (
    "Bernoulli",
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Dropout",
)
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One model with the inputs and outputs of its first data set."""

    name: str
    variant: str
    model: ModelProto
    inputs: Arrays
    outputs: tuple[Any, ...]

    @property
    def random(self) -> bool:
        return any(node.op_type in RANDOM for node in self.model.graph.node)


@functools.cache
def _loaded() -> tuple[Any, ...]:
    import warnings

    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(case for kind in KINDS for case in load_model_tests(kind=kind))


def names() -> list[str]:
    return [case.name for case in _loaded()]


def cases(variant: str, part: int = 0, parts: int = 1, only: str = "") -> Iterator[Case]:
    """Every `parts`-th model from `part` on; "const" leaves out those that have no second input to make constant."""
    for case in _loaded()[part::parts]:
        if re.search(only, case.name) and (made := _case(case, variant)) is not None:
            yield made


def _case(case: Any, variant: str) -> Case | None:
    model = case.model or onnx.load(Path(case.model_dir) / "model.onnx")
    inputs, outputs = case.data_sets[0] if case.data_sets else _stored(Path(case.model_dir), model)
    if variant == "const":
        model = _with_constants(model, inputs)
        if model is None:
            return None
    held = {tensor.name for tensor in model.graph.initializer}
    ends = [value.name for value in model.graph.input if value.name not in held]
    return Case(case.name, variant, model, dict(zip(ends, map(_array, inputs))), tuple(map(_array, outputs)))


def _array(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return value if isinstance(value, (list, dict, np.ndarray)) or value is None else np.asarray(value)


def _stored(folder: Path, model: ModelProto) -> tuple[list[Any], list[Any]]:
    """The first data set of a model that is stored as files."""
    held = {tensor.name for tensor in model.graph.initializer}
    sides = (("input", [v for v in model.graph.input if v.name not in held]), ("output", list(model.graph.output)))
    found: list[list[Any]] = []
    for side, values in sides:
        arrays = []
        for index, value in enumerate(values):
            content, kind = (
                (folder / "test_data_set_0" / f"{side}_{index}.pb").read_bytes(),
                value.type.WhichOneof("value"),
            )
            if kind == "sequence_type":
                arrays.append(numpy_helper.to_list(onnx.SequenceProto.FromString(content)))
            elif kind == "optional_type":
                arrays.append(numpy_helper.to_optional(onnx.OptionalProto.FromString(content)))
            else:
                arrays.append(numpy_helper.to_array(TensorProto.FromString(content)))
        found.append(arrays)
    return found[0], found[1]


def _with_constants(model: ModelProto, inputs: Sequence[Any]) -> ModelProto | None:
    made = ModelProto()
    made.CopyFrom(model)
    held = {tensor.name for tensor in made.graph.initializer}
    free = [value for value in made.graph.input if value.name not in held]
    if len(free) < 2:
        return None
    for value, given in list(zip(free, inputs))[1:]:
        if value.type.WhichOneof("value") != "tensor_type" or isinstance(given, (list, dict)) or given is None:
            return None
        if isinstance(given, TensorProto):
            tensor = TensorProto()
            tensor.CopyFrom(given)
            tensor.name = value.name
        else:
            tensor = numpy_helper.from_array(np.asarray(given), value.name)
        if tensor.data_type != value.type.tensor_type.elem_type:
            return None
        made.graph.initializer.append(tensor)
        made.graph.input.remove(value)
    made.ir_version = max(made.ir_version, 4)
    return made


# Running and comparing ---------------------------------------------------------------------------------------------------

Run = Callable[[ModelProto, Arrays], list[Any]]
Known = tuple[Run, list[Any]] | None


def run_ort(model: ModelProto, inputs: Arrays) -> list[Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def run_reference(model: ModelProto, inputs: Arrays) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(model).run(None, dict(inputs)))


def runner(case: Case) -> Known:
    """What runs the original and gives what the test expects, and what it gives; None: nothing does, or TensorRT has other
    scales than it."""
    from trtopt.graph.passes.intake import take_in

    if case.random or not take_in(case.model).exact:
        return None
    for run in (run_ort, run_reference):
        found = _tried(run, case.model, case.inputs)
        if isinstance(found, list) and alike(list(case.outputs), found, CLOSE):
            return run, found
    return None


def _tried(run: Run, model: ModelProto, inputs: Arrays) -> list[Any] | str:
    try:
        with np.errstate(all="ignore"):
            return run(model, inputs)
    except Exception as error:  # a runner's errors have no common base
        return f"{run.__name__} refuses it: {' '.join(str(error).split())[:200]}"


def alike(expected: Any, found: Any, tolerance: float) -> bool:
    if isinstance(expected, (list, tuple)) or isinstance(found, (list, tuple)):
        both = isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(expected) == len(found)
        return both and all(alike(a, b, tolerance) for a, b in zip(expected, found))
    if expected is None or found is None:
        return expected is found
    a, b = np.asarray(expected), np.asarray(found)
    if a.shape != b.shape:
        return False
    if a.dtype.kind in "OUS" or b.dtype.kind in "OUS":
        return bool((a.astype(str) == b.astype(str)).all())
    wide: Any = np.complex128 if a.dtype.kind == "c" else np.float64
    return bool(np.allclose(a.astype(wide), b.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True))


# Stages: each gives what is wrong, "" where nothing is, and what else is known --------------------------------------------


def folded(case: Case, known: Known, cleaned: Path | None = None) -> tuple[str, ModelProto | None]:
    """Folding: valid, equal to the original where something runs that (`runner`), or left as it was.

    `cleaned` is what `check --fix` wrote, to save folding the model again.
    """
    import trtopt
    from trtopt.graph.io import load_model
    from trtopt.graph.passes.fold import fold

    try:
        loaded = load_model(case.model)
    except trtopt.TrtoptError:
        return "", None
    made = load_model(cleaned).proto if cleaned else fold(loaded.proto)[0]
    try:
        load_model(made)
    except trtopt.TrtoptError as error:
        return f"the folded graph isn't valid: {error}", made
    if known is None:
        return "", made
    return _same("the folded graph", known, made, case.inputs, CLOSE), made


def typed(case: Case, made: ModelProto, known: Known) -> str:
    """FP16 typing of a folded graph: valid, and near the original."""
    import trtopt
    from trtopt.core.values import Precision
    from trtopt.graph.io import load_model
    from trtopt.graph.passes.opset import to_ir_at
    from trtopt.graph.passes.quantize import is_quantized
    from trtopt.graph.passes.typed import to_typed, typed_opset
    from trtopt.graph.view import to_proto

    model = to_ir_at(made, typed_opset(Precision.FP16, is_quantized(made)))
    half = to_proto(to_typed(model, Precision.FP16).model)
    try:
        load_model(half)
    except trtopt.TrtoptError as error:
        return f"the FP16 graph isn't valid: {error}"
    if known is None or case.name in ROUNDED:
        return ""
    return _same("the FP16 graph", known, half, case.inputs, HALF)


def _same(what: str, known: tuple[Run, list[Any]], made: ModelProto, inputs: Arrays, tolerance: float) -> str:
    """Empty where a runner gives the same: the one that ran the original, or another, which may know more operators."""
    problem = ""
    for run in dict.fromkeys((known[0], run_ort, run_reference)):
        found = _tried(run, made, inputs)
        if isinstance(found, str):
            problem = problem or found
        elif alike(known[1], found, tolerance):
            return ""
        else:
            problem = f"{what} gives something else"
            if (
                tolerance == CLOSE
            ):  # folding must satisfy the first that runs it; FP16 is rounded by each in its own way
                break
    return problem


def checked(case: Case, fix: Path, backend: str) -> tuple[str, bool]:
    """`check --fix`: no exception but a finding. Whether check is content, too."""
    import trtopt

    report = trtopt.check(case.model, fix=fix, backend=backend, **({"target": "sm89"} if backend == "rtx" else {}))
    mine = [item for item in report.findings if item.code == "fix-changed-outputs"]
    return (str(mine[0]) if mine else ""), report.ok or bool(mine)


def built(case: Case, folder: Path, **options: Any) -> dict[str, Any]:
    """A build, with `shapes=` from the test's data where they are asked for."""
    from trtopt.core.errors import TrtoptError, UsageError

    try:
        return _once(case, folder, (), options)
    except UsageError as error:
        text = str(error)
        if "`shapes=" not in text:
            return {"ok": False, "error": "UsageError", "text": text}
    except TrtoptError as error:
        return _refused(error, folder)
    try:
        return _once(case, folder, [_shapes(case, text)], options)
    except TrtoptError as error:
        return _refused(error, folder)


def _refused(error: Exception, folder: Path) -> dict[str, Any]:
    left = sorted(path.name for path in folder.iterdir())
    return {"ok": False, "error": type(error).__name__, "text": str(error), "left": left}


def _once(case: Case, folder: Path, shapes: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    import trtopt
    from trtopt.graph.io import load_model

    result = trtopt.build(
        case.model,
        folder / "e.engine",
        backend="rtx",
        target="sm89",
        shapes=shapes,
        compare=False,
        save_onnx=folder / "g.onnx",
        **options,
    )
    try:
        load_model(folder / "g.onnx")
        graph = ""
    except trtopt.TrtoptError as error:
        graph = str(error)
    return {"ok": True, "known": "can't be read" not in result.precision_summary, "graph": graph}


def _shapes(case: Case, text: str) -> str:
    parts = []
    for name, array in case.inputs.items():
        if isinstance(array, np.ndarray) and re.search(
            rf"(?<![\w.]){re.escape(name)}(?!\w)", text.partition("Write `")[0]
        ):
            values = f"values of the input {name}" in text or f"shape input {name}" in text
            numbers = [int(number) for number in np.ravel(array)] if values else list(array.shape)
            if numbers:
                parts.append(f"{name}:{'x'.join(map(str, numbers))}")
    return ";".join(parts)


def raw(case: Case) -> str:
    """TensorRT-RTX alone: "ok", or who refuses it."""
    import tensorrt_rtx as trt  # noqa: TID251  (the anchor that trtopt is held against)

    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network, config = builder.create_network(0), builder.create_builder_config()
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(case.model.SerializeToString()):
        return "the parser"
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.name not in case.inputs:
            return "the parser"  # it takes a loop's condition for an input
        array = case.inputs[tensor.name]
        if tensor.is_shape_tensor:
            profile.set_shape_input(tensor.name, *[tuple(int(number) for number in np.ravel(array))] * 3)
        elif any(size < 0 for size in tensor.shape):
            profile.set_shape(tensor.name, *[array.shape] * 3)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config) if network.num_outputs else None
    del parser
    return "the builder" if plan is None else "ok"


def parts_of(model: ModelProto) -> set[str]:
    """Names of nodes, tensors and inputs, those of bodies too."""

    def walk(graph: onnx.GraphProto) -> Iterator[str]:
        yield from (value.name for value in (*graph.input, *graph.output))
        yield from (tensor.name for tensor in graph.initializer)
        for node in graph.node:
            yield from (node.name, *node.input, *node.output)
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    yield from walk(attribute.g)

    return {name for name in walk(model.graph) if name}


def names_a_part(text: str, model: ModelProto) -> bool:
    said = text.partition("Write `")[0]
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", said) for name in parts_of(model))


# All of them, in processes ------------------------------------------------------------------------------------------------


def tried(case: Case, stages: Sequence[str], begin: Callable[[str], None]) -> dict[str, Any]:
    """One model through the stages; exceptions that aren't trtopt's own are part of the result."""
    row: dict[str, Any] = {}
    made: ModelProto | None = None
    known = functools.cache(lambda: runner(case))

    def stage(name: str, work: Callable[[], Any]) -> None:
        begin(name)
        started = time.monotonic()
        try:
            row[name] = work()
        except Exception as error:
            row[name] = {"internal": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        row.setdefault("seconds", {})[name] = round(time.monotonic() - started, 3)

    with tempfile.TemporaryDirectory(prefix="trtopt-onnx-") as scratch:
        folder = Path(scratch)
        if "raw" in stages:
            stage("raw", lambda: raw(case))
        if "check" in stages:
            stage("check", lambda: dict(zip(("wrong", "ok"), checked(case, folder / "fix.onnx", "rtx"))))
        if "fold" in stages:

            def fold() -> Any:
                nonlocal made
                wrong, made = folded(case, known())
                return wrong

            stage("fold", fold)
        if "fp16" in stages and made is not None:
            graph = made
            stage("fp16", lambda: typed(case, graph, known()))
        for name, options in (("build", {}), ("build16", {"fp16": True})):
            if name in stages:
                target = folder / name
                target.mkdir()
                stage(name, lambda target=target, options=options: built(case, target, **options))
                if (text := row[name].get("text")) is not None:
                    row[name]["named"] = names_a_part(text, case.model)
    return row


def faults(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """What is wrong, by kind; each model with what it says."""
    found: dict[str, list[str]] = {}

    def add(kind: str, row: dict[str, Any], text: object = "") -> None:
        found.setdefault(kind, []).append(f"{row['name']} ({row['variant']}): {str(text)[:400]}")

    for row in rows:
        if "crash" in row:
            add("crashes", row, row["crash"])
            continue
        for name in STAGES:
            if isinstance(row.get(name), dict) and "internal" in row[name]:
                add("internal errors", row, row[name]["internal"])
        for name, kind in (("fold", "folded graphs that differ"), ("fp16", "FP16 graphs that are wrong")):
            if isinstance(row.get(name), str) and row[name]:
                add(kind, row, row[name])
        check, plain, half = (row.get(name) or {} for name in ("check", "build", "build16"))
        if check.get("wrong"):
            add("cleaned models that are wrong", row, check["wrong"])
        if row.get("raw") == "ok" and plain.get("ok") is False:
            add("TensorRT builds, trtopt refuses", row, plain["text"])
        if check.get("ok") and plain.get("ok") is False:
            add("check is content, build refuses", row, plain["text"])
        if plain.get("ok") and half.get("ok") is False:
            add("FP32 builds, FP16 doesn't", row, half["text"])
        for result in (plain, half):
            if result.get("ok") and (result["graph"] or not result["known"]):
                add("builds with an invalid graph or unknown precision", row, result["graph"] or "unknown")
            if result.get("ok") is False and not result["named"]:
                add("messages that name no part", row, result["text"])
            if result.get("left"):
                add("refusals that left files", row, result["left"])
    return found


ALLOWED = {"check is content, build refuses": 10, "messages that name no part": 10}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--output", type=Path, help="write every model's row there, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work(given.stages.split(","))
    queue: Queue[tuple[str, str]] = Queue()
    for variant in given.variants.split(","):
        for name in names():
            if re.search(given.only, name):
                queue.put((name, variant))
    rows: list[dict[str, Any]] = []
    threads = [threading.Thread(target=serve, args=(queue, given.stages, rows)) for _ in range(given.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1))
    return report(rows)


def report(rows: list[dict[str, Any]]) -> int:
    wrong = faults(rows)
    for kind, texts in wrong.items():
        print(f"\n{kind}: {len(texts)}")
        print(*(f"  {text}" for text in texts[:20]), sep="\n")
    seconds = Counter[str]()
    for row in rows:
        seconds.update(row.get("seconds", {}))
    columns = ("variant", "models", "TensorRT alone builds", "trtopt builds, FP32", "FP16", "folded", "typed")
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for variant in VARIANTS:
        mine = [row for row in rows if row["variant"] == variant]
        counts = [
            len(mine),
            sum(row.get("raw") == "ok" for row in mine),
            *(sum(bool((row.get(name) or {}).get("ok")) for row in mine) for name in ("build", "build16")),
            *(sum(row.get(name) == "" for row in mine) for name in ("fold", "fp16")),
        ]
        print(f"| {variant} | {' | '.join(map(str, counts))} |")
    print("\nseconds: " + ", ".join(f"{name} {total:.0f}" for name, total in seconds.items()))
    failed = [kind for kind, texts in wrong.items() if len(texts) > ALLOWED.get(kind, 0)]
    print(f"wrong: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


def serve(queue: Queue[tuple[str, str]], stages: str, rows: list[dict[str, Any]]) -> None:
    """Give one process models until there are none; a process that ends takes one model with it."""
    process: subprocess.Popen[str] | None = None
    while True:
        try:
            name, variant = queue.get_nowait()
        except Empty:
            break
        if process is None:
            command = [sys.executable, __file__, "--worker", "--stages", stages]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{name} {variant}\n")
        process.stdin.flush()
        killer = threading.Timer(TIMEOUT, process.kill)
        killer.start()
        stage, row = "", None
        for line in process.stdout:
            if line.startswith("{"):
                row = json.loads(line)
                break
            stage = line.strip()
        killer.cancel()
        if row is None:
            row = {"crash": f"in {stage or 'loading'}, status {process.wait()}"}
            process = None
        if row:
            rows.append({"name": name, "variant": variant, **row})
    if process is not None and process.stdin is not None:
        process.stdin.close()
        process.wait()


def work(stages: Sequence[str]) -> int:
    import onnxruntime

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what native libraries print
    onnxruntime.set_default_logger_severity(4)
    by_name = {case.name: case for case in _loaded()}
    for line in sys.stdin:
        name, variant = line.split()
        case = _case(by_name[name], variant)
        row = {} if case is None else tried(case, stages, lambda stage: print(stage, file=answers))
        print(json.dumps(row), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
