"""Commands and options that went (docs/decisions/001-what-went.md), each with what to use instead."""

from __future__ import annotations

AT_URL = "a store at a URL"
WENT = {
    "gates": "calibrate --gates went: --all-tensors measures squeeze-and-excite, and all others",
    "bundle": "trtopt bundle went: docs/offline.md has its lines (uv pip compile, pip download --platform, tar)",
    "sign": "trtopt sign went: docs/security.md has what signs engines instead (cosign sign-blob, minisign -S)",
    "trusted_keys": "--trusted-keys went: check the signature before (cosign verify-blob, minisign -V): docs/security.md",
    "max_drop": "--max-drop went: give --metric FILE.py:function, --min and --labels (docs/accuracy.md has top-1 so)",
    "shard": "--shard of jobs run went: the number of workers says how samples are cut, and the tables don't depend on it",
    "drain": "--drain of serve went: tritonserver lets accepted requests end within its own --exit-timeout-secs, 30 s",
    "trust": "--trust of deploy triton, serve and inspect went: they go by the manifest; trtopt run and Session have it, and "
    "trtexec --loadEngine=M.engine --dumpLayerInfo lists the layers of any plan",
    "csv": "profile --csv went: trtopt profile M.engine --json has the same layers and figures",
    "trace": "profile --trace went: trtopt profile M.engine --json has the layers in their order, Nsight Systems has traces",
    "Duration": "trtopt.Duration went: the log (--log F.log) has how long each phase took, a result its seconds",
    "TunedFigures": "trtopt.TunedFigures went: a choice's figure has them in words, trtopt verify as numbers",
    "json_twin": "report --json-twin went: trtopt report --json has the verdict, trtopt inspect --json the layers, "
    "M.engine.results.json what was measured",
    "results": "report --results went: what was measured lies beside the engine, M.engine.results.json, and is read there; in "
    "Python trtopt.report(…, results=[…]) takes results",
    "report": "bench, build and tune --report went: trtopt report M.engine -o F.html after them finds what they measured",
    "calib": "report --calib went: trtopt sensitivity M.onnx measures what each scale costs, and report draws it",
    "against": "report --against went: trtopt inspect M.engine --diff OTHER.engine says what differs",
    "subject": "doctor M.engine went: trtopt inspect M.engine says what it is, for which GPU, and which TensorRT runs it; "
    "trtopt version whose engines those here run",
    "for_generation": "--for-generation went: every TensorRT reads the default, opset 17; 10, 11 and RTX also --opset 20",
    "trade_profiles": "--trade-profiles went: build --int8 --calib TABLE keeps INT8 whatever its times, or build an engine for "
    "each of the shapes",
    "ModelReport": "inspect M.onnx and trtopt.ModelReport went: trtopt check M.onnx tells of a model, --nodes of its nodes",
    "budget": "--budget went: a search is some thirty runs of the samples, --limit takes fewer; an interrupted one goes on",
    "dynamic": "--dynamic went: write a name in place of a size, --inputs x:batchx3xHxW",
    "from_images": "--from-images went: prepare photos in the client (Session.prepare); build --embed-preprocess takes pixels",
    **dict.fromkeys(
        ("runtime", "instances", "max_delay", "overwrite"),
        "serve takes a repository: trtopt deploy triton M.engine --repo models has such options; then trtopt serve models",
    ),
    "input_names": "--input-names went: names in --inputs are the file's, in forward's order, --inputs pixels:batchx3x224x224",
    **dict.fromkeys(
        ("min_shapes", "opt_shapes", "max_shapes"),
        "--min-shapes, --opt-shapes and --max-shapes went: --shapes NAME:MIN,OPT,MAX has all three, once for each input",
    ),
    **dict.fromkeys(
        ("data", "images", "preprocess"),
        "bench and profile take no samples: made-up inputs are as fast; trtopt run M.engine --data F.npz times real ones, and "
        "trtopt verify says how near results are",
    ),
    AT_URL: "stores at URLs went: give a folder, and copy it by rsync or a CI cache, docs/store.md has the lines",
}


def went(name: str) -> str:
    """Return what to use instead of a command, function or option that went, as it was typed; "" for any other."""
    return WENT.get(name.lstrip("-").replace("-", "_"), "")
