"""An installed TensorRT that loads plans; one that also builds them is a `trtopt.trt.generation.Generation`."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, ClassVar

from trtopt.core import operators
from trtopt.core.errors import BackendError, DeviceError, EngineError, EngineMismatch
from trtopt.cuda.device import Probe, probe
from trtopt.trt import compatibility, plans, plugins
from trtopt.trt.compatibility import PlanOrigin, numbers
from trtopt.trt.facts import GENERATIONS
from trtopt.trt.messages import Collector, Messages, translate
from trtopt.trt.plans import LoadedEngine, RuntimeSettings
from trtopt.trt.plugins import Creator, Library


class Loader:
    """One installed TensorRT: by itself a lean runtime, which has the runtime's classes, and no builder, parser or inspector.

    Attributes:
        family: "tensorrt8", "tensorrt10", "tensorrt11" or "rtx"; of a lean runtime "lean8", "lean10" or "lean11".
        facts: its generation's row of the table.
        product: whose plans it loads: "TensorRT" or "TensorRT-RTX".
        version: as the module says it.
        libraries: the user's plugins that were loaded.
    """

    product: ClassVar[str] = "TensorRT"
    lean: ClassVar[bool] = True

    def __init__(self, module: Any, family: str) -> None:
        self.module, self.facts = module, GENERATIONS[family]
        self.family = family.replace("tensorrt", "lean") if self.lean else family
        self.version = str(module.__version__)
        for old, new in self.facts.renamed.items():  # code here calls either by the older name
            kind, _, name = old.partition(".")
            if owner := getattr(module, kind, None):  # lean runtimes have fewer classes
                setattr(owner, name, getattr(owner, new))
        self._collector = Collector(module)
        self.libraries: tuple[Library, ...] = ()

    def __str__(self) -> str:
        return f"{self.product}{' lean' if self.lean else ''} {self.version}"

    def gpu(self) -> Probe:
        """Ask what the NVIDIA driver says; this comes before TensorRT, which may crash without a GPU."""
        return probe()

    def unread(self, origin: PlanOrigin) -> str:
        """Say why it doesn't run a plan of its product, and what to do; empty: it does."""
        return compatibility.unread(origin, self.version, lean=self.lean)

    def describe(self) -> dict[str, Any]:
        """Describe it as plain JSON values, for `trtopt version` and manifests."""
        gpu = self.gpu()
        return {
            "family": self.family,
            "product": str(self).rpartition(" ")[0],
            "version": self.version,
            "gpu": str(gpu.devices[0]) if gpu else None,
            "can_build": False,
            "why_not": "the lean runtime runs engines and builds none",
            "reads": compatibility.reads(self.product, self.version, lean=self.lean),
        }

    def load(
        self,
        plan: bytes | memoryview,
        name: str = "the plan",
        *,
        host_code: bool = False,
        runtime_cache: bytes | None = None,
        capture: bool = True,
    ) -> LoadedEngine:
        """Deserialize a plan, which messages call `name`, on this machine's GPU.

        Args:
            host_code: let a version-compatible plan run the code that it carries; only for plans from a trusted source.
            runtime_cache: what `LoadedEngine.runtime_cache()` gave before (TensorRT-RTX); one that doesn't fit is left out.
            capture: let TensorRT-RTX capture CUDA graphs; others leave that to the caller.

        Raises:
            UsageError: it carries such code, and `host_code` is False.
            EngineMismatch: made by another product, version or for another GPU; both are named.
            EngineError: not a plan, or damaged.
            DeviceError: there is no usable GPU.
        """
        header = plans.check_maker(plan, self.product, self.version, name)
        gpu = self.gpu()
        if not gpu:  # 8.6's Runtime() ends the process without one
            raise DeviceError(f"loading {name} needs a GPU: {gpu.reason}")
        with self._collector.collecting() as messages:
            self._register_plugins()
            runtime = self.native(self.module.Runtime, messages)
            if host_code:
                runtime.engine_host_code_allowed = True
            engine = self._deserialize(runtime, plan, name, messages)
            settings = self._runtime_settings(engine, runtime, runtime_cache, capture)
        maker_version = numbers(header.version) if header is not None and header.product == "TensorRT" else ()
        return LoadedEngine(self.module, engine, runtime, settings, self._collector.collecting, maker_version)

    def native(self, kind: Callable[..., Any], messages: Messages, what: str = "start", *arguments: Any) -> Any:
        """Make a native object with our logger; where there is none, the error that says what couldn't be done."""
        try:
            return kind(*arguments, self._collector.logger)
        except TypeError as error:  # how pybind11 says that the native side gave nothing: why, only the logger knows
            raise translate(messages.errors or (str(error),), f"{self} can't {what}", BackendError) from None

    def _deserialize(self, runtime: Any, plan: bytes | memoryview, name: str, messages: Messages) -> Any:
        """Return the ICudaEngine of `plan`, or raise the error of `load` that says why there is none."""
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is not None:
            return engine
        origin = plans.plan_origin(plan)
        other = origin is not None and numbers(origin.version)[:3] != numbers(self.version)[:3]
        if origin is not None and other and (why := self.unread(origin)):
            raise EngineMismatch(f"{name} was made by {origin}, this is {self}: {why}")
        if not runtime.engine_host_code_allowed and plans.carries_host_code(plan):
            raise plans.host_code_refused(name)
        if origin is None:
            reasons = "; ".join(messages.errors[:3]) or "TensorRT gave no message"
            raise EngineError(f"{name} isn't a TensorRT plan, or is damaged ({reasons})")
        raise translate(messages.errors, f"{name} can't be loaded", EngineError)

    def _register_plugins(self) -> None:
        """Fill the registry: 8.6 and 10 have some ONNX operators as plugins, which plans name, too; and the user's own."""
        if self.lean:
            return
        if hasattr(self.module, "init_libnvinfer_plugins"):
            self.module.init_libnvinfer_plugins(self._collector.logger, "")
        self.libraries = plugins.load(self.module, operators.plugins(), str(self))

    def creators(self, names: Container[str] | None = None) -> tuple[Creator, ...]:
        """Return every plugin that it can make, with all fields or those of some `names`; UsageError as `plugins.load`."""
        if self.lean or not hasattr(self.module, "get_plugin_registry"):
            return ()
        with self._collector.collecting():
            self._register_plugins()
            return plugins.registered(self.module, self.libraries, names)

    def _runtime_settings(
        self, engine: Any, runtime: Any, runtime_cache: bytes | None, capture: bool
    ) -> RuntimeSettings | None:
        """Return how contexts of the engine are made, where that takes an IRuntimeConfig."""
        return None
