"""bench() as users call it: the measurements, and a page on the engine where one is asked for."""

from __future__ import annotations

from trtopt.core.errors import require
from trtopt.core.options import taking
from trtopt.evaluation.benchmark import BenchReport, measure
from trtopt.evaluation.request import BenchRequest


@taking(BenchRequest)
def bench(request: BenchRequest) -> BenchReport:
    """Measure an engine, and what else can run the model, on the same inputs.

    Args:
        engine: a plan file.
        against: of "torch", "onnxruntime"; all are opened before anything is measured.
        batch: samples at a time; empty: what each profile is tuned for.
        streams: threads that call at the same time, for the throughput.
        iterations, warmup: calls of each kind; fewer where one way of running would take more than ten seconds.
        data, images, preprocess: real inputs, as for `calibrate`; without, synthetic ones, which say how fast it is and
            nothing else. Without `preprocess`, images are prepared as the manifest says;
            a mapping without `preset` changes that.
        model: the ONNX model for ONNX Runtime; default: the one that the manifest names.
        source: where PyTorch's module comes from, as for `export`.
        trust, trust_host_code: as for `Session`.
        report: where to write a page on the engine, of this and its manifest (see `trtopt.report`).

    Raises:
        UsageError: arguments that can't be right, or a batch outside the engine's shapes.
        MissingDependency: something in `against` isn't installed.
        DeviceError: no GPU, or PyTorch can't use it.
        OutputError: the page can't be written.
        ModelError: a baseline can't load the model. One that can't run it has a row that says so.
    """
    if request.report is not None:
        require("onnx_ir", "onnx", "a page on the engine")
        from trtopt.diagnosis import page  # engines are measured without onnx, too

        page.ready()
    result = measure(request)
    if request.report is not None:
        page.report(request.engine, request.report, results=[result], model=request.model, reporter=request.reporter)
        request.reporter.note(f"{request.report} says what is known of the engine")
    return result
