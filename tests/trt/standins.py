"""Stand-ins for the `tensorrt` modules of 8.6, 10, 11 and RTX, made from lists of the names that each has (api/).

"lean-8.6.0", "lean-10.16.1" and "lean-11.4.0" are the lean runtimes: their wheels have the same classes, and
fewer (api/lean.json).

A stand-in holds those names and no others: touching another raises AttributeError and is remembered in `missed`. What
the door needs is simulated just enough to follow it: the parser reads the real ONNX file, the builder writes a plan
that says what it was asked, the inspector reports it in the generation's own style. Native libraries of 10 and 11 can't
be installed here; this is how their code paths are run at all.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
import re
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper

from trtopt.trt.facts import GENERATIONS, family_of

API = Path(__file__).parent / "api"
VERSIONS = tuple(sorted((path.stem for path in API.glob("[1-9]*.json")), key=lambda name: int(name.split(".")[0])))
LEAN_VERSIONS = tuple(f"lean-{version}" for version in VERSIONS)
SCRATCH = 4096  # bytes a context needs; one more by the v2 name, to tell them apart
UNSUPPORTED = {"Det", "Frobnicate"}  # operators that the simulated parsers refuse
# What Python may override though the class doesn't list it (its C++ trampoline looks it up), and trtopt's own additions.
_OVERRIDES = {"IOutputAllocator": {"reallocate_output", "reallocate_output_async", "notify_shape", "check"}}
_HEAVY = {
    "Conv": "CONVOLUTION",
    "ConvTranspose": "DECONVOLUTION",
    "Gemm": "MATRIX_MULTIPLY",
    "MatMul": "MATRIX_MULTIPLY",
}


class Simulation:
    """One stand-in module and everything that was done to it.

    Args:
        later: it is a pretended version with the names of `version`, apart from those that are `renamed`: "Class.name" → new.

    Attributes:
        module: what takes the place of `tensorrt`.
        missed: "Class.name" of every name that this generation lacks and that was asked for.
        configs, networks: every config and network that was created, in order.
        warnings: messages that the builder logs, (severity, text).
        fail: the builder logs this error and gives no plan.
        block: called during a build (to interrupt it there).
        shared: engines were built so that their contexts share profiles.
        no_context: the engine logs this error and gives no context.
        contexts: every execution context that was created, in order.
        creators: what is in the plugin registry.
    """

    def __init__(self, version: str, later: str = "", renamed: Mapping[str, str] | None = None) -> None:
        full = version.removeprefix("lean-")
        self.api = json.loads((API / f"{full}.json").read_text())
        if version.startswith("lean-"):
            for kind, names in json.loads((API / "lean.json").read_text())[full].items():
                there = self.api[kind]
                self.api[kind] = {name: there[name] for name in names} if isinstance(there, dict) else names
        self.version = later or self.api["version"]
        self.major = int((later or full).removeprefix("rtx-").split(".")[0])
        self.rtx = version.startswith("rtx")
        family = family_of("rtx" if self.rtx else "tensorrt", (self.major, 99))
        self.renamed = renamed or (GENERATIONS[family].renamed if family else {})
        self.missed: set[str] = set()
        self.configs: list[Any] = []
        self.networks: list[Any] = []
        self.warnings: list[tuple[str, str]] = []
        self.fail: str | None = None
        self.block: Any = None
        self.has_gpu = True
        self.start_error = ""  # what the logger says of a builder that can't start
        self.shared = True
        self.no_context: str | None = None
        self.contexts: list[Any] = []
        self.creators: list[Any] = []
        self.module: Any = _Module(self)


class _Module(types.ModuleType):
    def __init__(self, sim: Simulation) -> None:
        super().__init__("tensorrt")
        self.__dict__["_sim"] = sim
        self.__version__ = sim.version
        simulated = _simulated(sim)
        for name, members in sim.api["classes"].items():
            made = {sim.renamed.get(f"{name}.{key}", key): value for key, value in simulated.get(name, {}).items()}
            there = [sim.renamed.get(f"{name}.{member}", member) for member in members]
            setattr(self, name, _strict_class(sim, name, there, made))
        for name, listed in sim.api["enums"].items():
            members = {sim.renamed.get(f"{name}.{key}", key): value for key, value in listed.items()}
            outer, _, inner = name.rpartition(".")
            values = _enum(sim, inner, members)
            setattr(getattr(self, outer) if outer else self, inner, values)
            if inner == "Severity":
                for member in values:  # ILogger.ERROR is ILogger.Severity.ERROR
                    type.__setattr__(getattr(self, outer), member.name, member)
        for name in sim.api["functions"]:
            setattr(self, name, lambda *arguments, **named: True)
        if "IPluginRegistry" in sim.api["classes"]:
            registry = self.IPluginRegistry()
            self.get_plugin_registry = lambda: registry

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.__dict__["_sim"].missed.add(name)
        raise AttributeError(f"TensorRT {self.__dict__['_sim'].version} has no {name}")


class _RecordingEnum(enum.EnumMeta):
    def __getattr__(cls, name: str) -> Any:
        members = cls.__dict__.get("_member_map_", {})  # before Python 3.12 members are no class attributes
        if name in members:
            return members[name]
        if not name.startswith("_"):
            _enum_owners[cls].missed.add(f"{cls.__name__}.{name}")
        raise AttributeError(f"{cls.__name__} has no {name}")


_enum_owners: dict[type, Simulation] = {}


class _Values(enum.Enum, metaclass=_RecordingEnum):
    def __int__(self) -> int:
        return int(self.value)


def _enum(sim: Simulation, name: str, members: dict[str, int]) -> Any:
    made: Any = _Values(name, members)  # type: ignore[call-overload]
    _enum_owners[made] = sim
    return made


class _StrictMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if not name.startswith("_"):
            cls._sim.missed.add(f"{cls._api_name}.{name}")
        raise AttributeError(f"{cls._api_name} has no {name}")


class _Recorded:
    """A plain attribute: what is written is kept in `_set`, what wasn't written can't be read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        assert self.name in instance._set, (
            f"{type(instance).__name__}.{self.name} isn't simulated: add it to standins.py"
        )
        return instance._set[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        instance._set[self.name] = value


def _strict_class(sim: Simulation, name: str, members: list[str], simulated: dict[str, Any]) -> Any:
    def new(cls: Any, *arguments: Any, **named: Any) -> Any:
        self = object.__new__(cls)
        object.__setattr__(self, "_set", {})
        return self

    def get(self: Any, missing: str) -> Any:
        if not missing.startswith("_"):
            sim.missed.add(f"{name}.{missing}")
        raise AttributeError(f"TensorRT {sim.version}: {name} has no {missing}")

    def assign(self: Any, attribute: str, value: Any) -> None:
        if not attribute.startswith("_") and attribute not in members:
            sim.missed.add(f"{name}.{attribute}")
            raise AttributeError(f"TensorRT {sim.version}: {name} has no {attribute}")
        object.__setattr__(self, attribute, value)

    def subclassed(cls: Any, **named: Any) -> None:
        for attribute in vars(cls):  # a method that the base never calls is a misspelt one
            known = {*members, *_OVERRIDES.get(name, ())}
            if not attribute.startswith("_") and attribute not in known:
                sim.missed.add(f"{name}.{attribute} (overridden)")

    namespace: dict[str, Any] = {
        "_sim": sim,
        "_api_name": name,
        "__new__": new,
        "__init__": lambda self, *arguments, **named: None,
        "__getattr__": get,
        "__setattr__": assign,
        "__init_subclass__": classmethod(subclassed),
    }
    namespace.update({member: _Recorded(member) for member in members if not member.startswith("__")})
    namespace.update({key: value for key, value in simulated.items() if key.startswith("_") or key in members})
    return _StrictMeta(name, (), namespace)


class HostMemory(bytes):
    """A plan: bytes are the only buffers that Python code can make on every version."""


def _simulated(sim: Simulation) -> dict[str, dict[str, Any]]:
    """Behaviour by class; names that the generation lacks are left out by the caller."""

    def log(logger: Any, severity: str, text: str) -> None:
        logger.log(getattr(sim.module.ILogger.Severity, severity), text)

    def new(kind: str, **attributes: Any) -> Any:
        made = getattr(sim.module, kind)()
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    def named(kind: str, member: Any) -> str:
        assert isinstance(member, getattr(sim.module, kind))
        return str(member.name)

    # Builder

    def builder_init(self: Any, logger: Any) -> None:
        if error := sim.start_error or ("" if sim.has_gpu else "CUDA initialization failure with error: 35"):
            log(logger, "ERROR", error)
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger = logger

    def create_network(self: Any, flags: int = 0) -> Any:
        known = {int(flag) for flag in sim.module.NetworkDefinitionCreationFlag}
        assert all(1 << bit & flags == 0 or bit in known for bit in range(32)), f"unknown network flags {flags:b}"
        network = new("INetworkDefinition", _flags=flags, _logger=self._logger, _tensors=[], _results=[], _layers=[])
        sim.networks.append(network)
        return network

    def create_config(self: Any) -> Any:
        config = new("IBuilderConfig", _flags={"TF32"}, _pools={}, _profiles=[], _calibration=None, _previews={})
        config._cache, config._logger = None, self._logger
        sim.configs.append(config)
        return config

    def build(self: Any, network: Any, config: Any) -> Any:
        for severity, text in sim.warnings:
            log(self._logger, severity, text)
        if sim.fail is not None:
            log(self._logger, "ERROR", sim.fail)
            return None
        log(self._logger, "VERBOSE", "--------------- Timing Runner: conv1 + relu1 (CaskConvolution[0x80000009])")
        if any(-1 in tensor.shape for tensor in network._tensors) and not config._profiles:
            text = "Network has dynamic or shape inputs, but no optimization profile has been defined."
            log(self._logger, "ERROR", text)
            return None
        if sim.block is not None:
            sim.block()
        monitor = config._set.get("progress_monitor")
        if monitor is not None:
            monitor.phase_start("Building engine", None, 2)
            for step in range(2):
                if not monitor.step_complete("Building engine", step):
                    log(self._logger, "ERROR", "Error Code 7: BuildCanceled (Build canceled by user)")
                    return None
            monitor.phase_finish("Building engine")
        calibrator = config._set.get("int8_calibrator")
        if calibrator is not None and "INT8" in config._flags:
            _calibrate(calibrator, [tensor.name for tensor in network._tensors], sim.version)
        return HostMemory(_plan(sim, network, config))

    # INetworkDefinition, ITensor, ILayer

    def tensor(value: onnx.ValueInfoProto) -> Any:
        made = sim.module.ITensor()
        kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
        other = {"FLOAT16": "HALF"} | ({"INT64": "INT32"} if sim.major == 8 else {})
        dims = value.type.tensor_type.shape.dim
        made._set.update(
            name=value.name,
            dtype=getattr(sim.module.DataType, other.get(kind, kind)),
            shape=tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims),
            is_shape_tensor=False,
        )
        made._dims = [dim.dim_param for dim in dims]
        return made

    def layer(node: onnx.NodeProto, weights: dict[str, Any]) -> Any:
        made, output = sim.module.ILayer(), sim.module.ITensor()
        output._set.update(dtype=sim.module.DataType.FLOAT, is_shape_tensor=False, name=node.output[0])
        made._outputs, made._output_types = [output], {}
        kind = getattr(sim.module.LayerType, _HEAVY.get(node.op_type, "ACTIVATION"))
        values = {"name": node.name, "type": kind, "num_outputs": 1, "metadata": f"[ONNX Layer: {node.name}]"}
        made._set.update({key: value for key, value in values.items() if key in sim.api["classes"]["ILayer"]})
        made._weights = (
            [weights[name] for name in node.input[1:3] if name in weights] if kind.name == "CONVOLUTION" else []
        )
        return made

    # Weights of convolutions, as a plan that can be refitted has them

    def held(index: int) -> Any:
        return property(lambda self: self._weights[index] if index < len(self._weights) else None)

    def refitter_init(self: Any, engine: Any, logger: Any) -> None:
        self._engine, self._given = engine, {}
        self._roles = sim.module.WeightsRole

    def refittable(engine: Any) -> dict[str, str]:
        return dict(_loaded(engine._report).get("Weights", {}))

    def pairs(keys: Any) -> tuple[list[str], list[Any]]:
        found = [key.rsplit("|", 1) for key in keys]
        return [name for name, _ in found], [getattr(sim.module.WeightsRole, role) for _, role in found]

    def set_weights(self: Any, name: str, role: Any, values: Any) -> bool:
        key, values = f"{name}|{role.name}", np.array(values)
        shape = refittable(self._engine).get(key, "").partition(" ")[0]
        if shape != str(values.size):  # "a wrong weights name or a change in the weights count"
            return False
        self._given[key] = _of(values)
        return True

    def do_refit(self: Any) -> bool:
        if refittable(self._engine).keys() - self._given:
            return False
        report = {**_loaded(self._engine._report), "Weights": self._given, "Stripped": False}
        self._engine._report = _dumped(report)
        return True

    def serialize(self: Any, config: Any = None) -> Any:
        report = _loaded(self._report)
        if config is not None and "INCLUDE_REFIT" not in config._flags:
            report["Weights"] = {"kept": _of(np.array(sorted(report["Weights"].items()), dtype=np.str_))}
            report["Refit"] = False
        return HostMemory(_header(sim.version).ljust(64, b"\0") + _dumped(report).encode())

    # OnnxParser

    def parser_init(self: Any, network: Any, logger: Any) -> None:
        self._network, self._logger, self._errors, self._groups, self._asked = network, logger, [], [], False

    def look(self: Any, model: onnx.ModelProto) -> None:
        self._errors = [(i, node) for i, node in enumerate(model.graph.node) if node.op_type in UNSUPPORTED]
        bad = UNSUPPORTED | {"NonZero"}  # as 10.6, which builds it
        runs = itertools.groupby(enumerate(model.graph.node), lambda item: item[1].op_type in bad)
        self._groups = [[index for index, _ in run] for left_out, run in runs if not left_out]

    def parse_file(self: Any, path: str) -> bool:
        assert not self._asked, "what supports_model has parsed is in the network"
        model = onnx.load(path)
        look(self, model)
        if self._errors:
            return False
        if sim.major == 8 and model.opset_import[0].version > 17:
            log(self._logger, "WARNING", "parsed with an opset newer than 17")
        arrays = {item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer}
        weights = arrays.keys()
        self._network._tensors = [tensor(value) for value in model.graph.input if value.name not in weights]
        self._network._results = [tensor(value) for value in model.graph.output]
        self._network._layers = [layer(node, arrays) for node in model.graph.node]
        self._network._onnx = model
        return True

    def supports_v2(self: Any, content: bytes, path: str | None = None) -> bool:
        model = onnx.load_from_string(content)
        self._asked = True
        look(self, model)
        return not self._errors and sum(map(len, self._groups)) == len(model.graph.node)

    def supports(self: Any, content: bytes, path: str | None = None) -> tuple[bool, list[tuple[list[int], bool]]]:
        good = supports_v2(self, content, path)
        return good, [(group, good) for group in self._groups]

    def error(self: Any, index: int) -> Any:
        made = sim.module.ParserError()
        number, node = self._errors[index]
        made._facts = {"node": number, "node_name": node.name, "node_operator": node.op_type, "desc": "false"}
        return made

    def fact(name: str) -> Any:
        return lambda self: self._facts[name]

    # IBuilderConfig

    def add_profile(self: Any, profile: Any) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def set_cache(self: Any, cache: Any, ignore_mismatch: bool) -> bool:
        if cache._content and not cache._content.startswith(f"timings of {sim.version}".encode()):
            log(self._logger, "ERROR", "Timing cache version mismatch")
            return False
        self._cache = cache
        return True

    def cache_bytes(self: Any) -> bytes:
        return self._content or f"timings of {sim.version}\n".encode()

    def combine(self: Any, other: Any, ignore_mismatch: bool) -> bool:
        mine = cache_bytes(self)
        if not other._content.startswith(mine.splitlines()[0]):
            return False
        self._content = b"\n".join(dict.fromkeys([*mine.splitlines(), *other._content.splitlines()])) + b"\n"
        return True

    # Runtime

    def runtime_init(self: Any, logger: Any) -> None:
        self._logger = logger
        self._set["engine_host_code_allowed"] = False

    def deprecated(name: str) -> None:
        """As 10's bindings warn (python/src/infer/pyCore.cpp): they make the call even where the warning is an error, which
        then is left set."""
        if sim.major == 10:
            try:
                warnings.warn(f"{name} is deprecated", DeprecationWarning, stacklevel=3)
            except DeprecationWarning as error:
                raise SystemError(f"{name} returned a result with an exception set") from error

    def deserialize(self: Any, plan: Any) -> Any:
        text, elf, _ = bytes(plan).partition(b"\x7fELF")
        if elf and not self.engine_host_code_allowed:
            log(self._logger, "ERROR", "the plan can't be loaded")  # what it says really was never seen
            return None
        carried = bool(elf) and sim.major == 10  # its own runtime answers, whatever its version
        if not (carried or text.startswith((_header(sim.version), _rtx_header(sim.version, len(text))))):
            log(self._logger, "ERROR", "Serialization assertion failed: version tag does not match")
            return None
        engine = sim.module.ICudaEngine()
        engine._report, engine._logger = text[64:].decode(), self._logger
        # A runtime before 10.1, to which calls are handed on.
        engine._early = carried and not text.startswith(_header(sim.version))
        return engine

    def scratch(self: Any) -> int:
        deprecated("device_memory_size")
        return SCRATCH

    def aliased(self: Any, name: str) -> None:
        assert not self._early, "it isn't handed on to a runtime before 10.15: the process ends"

    def without_memory(self: Any) -> Any:
        deprecated("create_execution_context_without_device_memory")
        return new_context(self, "without")

    def context(self: Any, how: Any = None) -> Any:
        """One with its own memory, or as `how` says: a strategy, or an IRuntimeConfig."""
        assert how is None or not self._early, "it isn't handed on to a runtime before 10.0"
        return new_context(self, how)

    def new_context(self: Any, how: Any) -> Any:
        if sim.no_context is not None:
            log(self._logger, "ERROR", sim.no_context)
            return None
        made = sim.module.IExecutionContext()
        made._how, made._early, made._profile = how, self._early, 0
        made._set["active_optimization_profile"] = 0 if sim.shared or not sim.contexts else -1
        sim.contexts.append(made)
        return made

    def set_memory(self: Any, address: int, size: int) -> None:
        assert not self._early, "it isn't handed on to a runtime before 10.1"
        assert size >= SCRATCH
        self._memory = (address, size)

    def set_profile(self: Any, profile: int, stream: int) -> bool:
        self._profile = profile
        return True

    def set_shape(self: Any, name: str, shape: Any) -> None:
        assert self._set["active_optimization_profile"] >= 0, "8.6 ends the process here"
        self._shape = shape

    # TensorRT-RTX's IRuntimeConfig, IRuntimeCache

    def read_runtime_cache(self: Any, blob: bytes) -> bool:
        if not blob.startswith(b"kernels"):
            return False
        self._content = bytes(blob)
        return True

    def profile_shape(self: Any, *which: Any) -> list[tuple[int, ...]]:
        assert sorted(map(str, which)) in (["0", "x"], ["1", "x"])
        return [(batch, 3, 32, 32) for batch in (1, 4, 8)]

    def information(self: Any, form: Any) -> str:
        # As 8.6 was seen to answer for a dynamic engine whose shapes aren't set.
        context = self._set.get("execution_context")
        if sim.major == 10 and context is not None and _loaded(self._report)["Profiles"] > 1 and not context._profile:
            return ""  # as 10.6, where layers of another profile are Myelin's
        known = context is not None and getattr(context, "_shape", None) is not None
        return str(self._report) if known else _UNKNOWN_TYPE.sub(r'\1"N/A due to dynamic shapes"', self._report)

    return {
        "Builder": {
            "__init__": builder_init,
            "create_network": create_network,
            "create_builder_config": create_config,
            "create_optimization_profile": lambda self: new("IOptimizationProfile", _shapes={}, _values={}),
            "build_serialized_network": build,
        },
        "INetworkDefinition": {
            "num_inputs": property(lambda self: len(self._tensors)),
            "num_outputs": property(lambda self: len(self._results)),
            "num_layers": property(lambda self: len(self._layers)),
            "get_input": lambda self, index: self._tensors[index],
            "get_output": lambda self, index: self._results[index],
            "get_layer": lambda self, index: self._layers[index],
        },
        "ITensor": {"get_dimension_name": lambda self, axis: self._dims[axis]},
        "ILayer": {
            "get_output": lambda self, index: self._outputs[index],
            "set_output_type": lambda self, index, kind: self._output_types.__setitem__(index, kind),
        },
        "OnnxParser": {
            "__init__": parser_init,
            "parse_from_file": parse_file,
            "supports_model": supports,
            "supports_model_v2": supports_v2,
            "num_subgraphs": property(lambda self: len(self._groups)),
            "get_subgraph_nodes": lambda self, index: self._groups[index],
            "is_subgraph_supported": lambda self, index: len(self._groups) == 1,
            "num_errors": property(lambda self: len(self._errors)),
            "get_error": error,
        },
        "ParserError": {name: fact(name) for name in ("node", "node_name", "node_operator", "desc")},
        "IBuilderConfig": {
            "set_flag": lambda self, flag: self._flags.add(named("BuilderFlag", flag)),
            "set_preview_feature": lambda self, feature, on: self._previews.update(
                {named("PreviewFeature", feature): on}
            ),
            "clear_flag": lambda self, flag: self._flags.discard(named("BuilderFlag", flag)),
            "set_memory_pool_limit": lambda self, pool, size: self._pools.update({named("MemoryPoolType", pool): size}),
            "add_optimization_profile": add_profile,
            "set_calibration_profile": lambda self, profile: setattr(self, "_calibration", profile),
            "create_timing_cache": lambda self, content: new("ITimingCache", _content=bytes(content)),
            "set_timing_cache": set_cache,
            "get_timing_cache": lambda self: self._cache,
        },
        "IPluginRegistry": {
            "register_creator": lambda self, creator, namespace="": sim.creators.append(creator) or True,
            "all_creators": property(lambda self: list(sim.creators)),
            "plugin_creator_list": property(lambda self: list(sim.creators)),
            "load_library": lambda self, path: None,
        },
        "ITimingCache": {"serialize": cache_bytes, "combine": combine},
        "IOptimizationProfile": {
            "set_shape": lambda self, name, low, opt, high: self._shapes.__setitem__(name, (low, opt, high)),
            "set_shape_input": lambda self, name, low, opt, high: self._values.__setitem__(name, (low, opt, high)),
        },
        "Runtime": {
            "__init__": runtime_init,
            "deserialize_cuda_engine": deserialize,
        },
        "ICudaEngine": {
            "create_engine_inspector": lambda self: new("EngineInspector", _report=self._report),
            "refittable": property(lambda self: _loaded(self._report).get("Refit", False)),
            "serialize": serialize,
            "serialize_with_config": serialize,
            "create_serialization_config": lambda self: new("ISerializationConfig", _flags=set()),
            "create_execution_context": context,
            "create_execution_context_without_device_memory": without_memory,
            "device_memory_size": property(scratch),
            # 0: "only supported from TensorRT 10.1 onwards", it logs
            "device_memory_size_v2": property(lambda self: 0 if self._early else SCRATCH + 1),
            "get_aliased_input_tensor": aliased,
            "create_runtime_config": lambda self: sim.module.IRuntimeConfig(),
            "num_io_tensors": property(lambda self: 1),
            "num_optimization_profiles": property(lambda self: _loaded(self._report).get("Profiles", 1)),
            "get_tensor_name": lambda self, index: "x",
            "get_tensor_mode": lambda self, name: sim.module.TensorIOMode.INPUT,
            "get_tensor_shape": lambda self, name: (-1, 3, 32, 32),
            "get_tensor_profile_shape": profile_shape,
        },
        "IExecutionContext": {
            "set_optimization_profile_async": set_profile,
            "set_input_shape": set_shape,
            "set_device_memory": set_memory,
        },
        "IRuntimeConfig": {
            "set_execution_context_allocation_strategy": lambda self, strategy: setattr(self, "_strategy", strategy),
            "create_runtime_cache": lambda self: new("IRuntimeCache", _content=b"kernels"),
            "set_runtime_cache": lambda self, cache: setattr(self, "_cache", cache) or True,
        },
        "IRuntimeCache": {"deserialize": read_runtime_cache, "serialize": lambda self: HostMemory(self._content)},
        **{name: {"kernel": held(0), "bias": held(1)} for name in ("IConvolutionLayer", "IDeconvolutionLayer")},
        "ISerializationConfig": {
            "set_flag": lambda self, flag: self._flags.add(flag.name),
            "clear_flag": lambda self, flag: self._flags.discard(flag.name),
        },
        "Refitter": {
            "__init__": refitter_init,
            "get_all": lambda self: pairs(refittable(self._engine)),
            "get_missing": lambda self: pairs(refittable(self._engine).keys() - self._given),
            "set_weights": set_weights,
            "refit_cuda_engine": do_refit,
        },
        "EngineInspector": {"get_engine_information": information},
    }


_UNKNOWN_TYPE = re.compile(r'("(?:Format/Datatype|Datatype|Format)": )"[^"]*"')


def _calibrate(calibrator: Any, names: list[str], version: str) -> None:
    assert calibrator.get_batch_size() > 0
    major, minor, patch = map(int, version.split(".")[:3])
    header = f"TRT-{major * (10000 if major >= 10 else 1000) + minor * 100 + patch}-EntropyCalibration2\n".encode()
    if not (calibrator.read_calibration_cache() or b"").startswith(header):  # 10.6 passes over other versions' (seen)
        while (pointers := calibrator.get_batch(names)) is not None:
            assert all(isinstance(pointer, int) for pointer in pointers) and len(pointers) == len(names)
    calibrator.write_calibration_cache(memoryview(header + b"x: 3d4ccccd\n"))


LEAN_RUNTIME = b"\x7fELF".ljust(18, b"\0") + b"\x3e\0 the library"  # of x86-64


def _header(version: str) -> bytes:
    numbers = [int(part) for part in version.split(".")] + [0, 0]
    return b"ftrt" + bytes(20) + bytes(numbers[:4])


def _rtx_header(version: str, size: int) -> bytes:
    return b"vtrt" + bytes(12) + size.to_bytes(8, "little") + _header(version)[-4:]


def plan_without_layers(sim: Simulation) -> bytes:
    report = b'{"Layers": []}'
    header = _rtx_header(sim.version, 64 + len(report)) if sim.rtx else _header(sim.version)
    return header.ljust(64, b"\0") + report


def _dumped(report: dict[str, Any]) -> str:
    return json.dumps(report).replace("\\u001e", "\x1e")  # as TensorRT does: raw


def _loaded(report: str) -> dict[str, Any]:
    return dict(json.loads(report, strict=False))


def _of(values: Any) -> str:
    """The count of an array, and its content."""
    return f"{values.size} {hashlib.sha256(values.tobytes()).hexdigest()}"


def _plan(sim: Simulation, network: Any, config: Any) -> bytes:
    """A header as a plan's, then the report that the inspector gives back, in the style of the generation."""
    typed = "STRONGLY_TYPED" in {
        flag.name for flag in sim.module.NetworkDefinitionCreationFlag if network._flags >> int(flag) & 1
    }
    quantized = {
        name for node in network._onnx.graph.node if node.op_type == "DequantizeLinear" for name in node.output
    }
    layers = []
    for node in network._onnx.graph.node:
        if node.op_type not in _HEAVY:
            continue
        kind = "Int8" if set(node.input) & quantized or ("INT8" in config._flags and not quantized) else "Half"
        if kind == "Half" and "FP16" not in config._flags and not typed:
            kind = "Float"
        said = {"Int8": "Thirty-two wide channel vectorized row major Int8 format", "Half": "Row major linear FP16"}
        if sim.major == 8:
            read, written = ({"Format/Datatype": said.get(item, "Row major linear FP32")} for item in (kind, "Float"))
            name, layer_type = f"{node.name}.weight + QuantizeLinear_1 + {node.name} + Relu_9", "CaskConvolution"
        else:
            read, written = ({"Datatype": item, "Format": "Row major linear"} for item in (kind, "Float"))
            layer_type = "gemm" if "MATRIX" in _HEAVY[node.op_type] else "correlation"
            name = f"{node.name}_myl0_3"
        made = {"Name": name, "LayerType": layer_type} | ({"ParameterType": "Convolution"} if sim.major == 8 else {})
        nodes = f"[ONNX Layer: {node.name}]\x1e[ONNX Layer: relu]"
        ends = {"Inputs": [{"Name": "in", **read}], "Outputs": [{"Name": "out", **written}]}
        layers.append({**made, **ends, "Metadata": nodes})
    flags, report = config._flags, {"Layers": layers, "Bindings": [], "Profiles": max(1, len(config._profiles))}
    stripped = bool(flags & {"STRIP_PLAN", "WEIGHTLESS"})  # its other name in 10
    if stripped or "REFIT" in flags:
        roles = ("KERNEL", "BIAS")
        held = {
            f"{node.name}|{role}": _of(values)
            for node, layer in zip(network._onnx.graph.node, network._layers)
            for role, values in zip(roles, layer._weights)
        }
        report |= {
            "Refit": True,
            "Weights": {key: said.partition(" ")[0] if stripped else said for key, said in held.items()},
        }
        report["Stripped"] = stripped
    lean = LEAN_RUNTIME if "VERSION_COMPATIBLE" in flags and "EXCLUDE_LEAN_RUNTIME" not in flags else b""
    return (_header(sim.version)).ljust(64, b"\0") + _dumped(report).encode() + lean
