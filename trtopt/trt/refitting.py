"""Other weights in an engine: a refitter given a network's, and the plan written again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtopt.core.errors import BackendError, UnsupportedRequest
from trtopt.core.values import BuildSpec
from trtopt.core.words import first_of
from trtopt.cuda.device import current_gpu
from trtopt.trt import parsing
from trtopt.trt.generation import Generation
from trtopt.trt.messages import translate


def refit_plan(
    generation: Generation,
    plan: bytes,
    model: Path,
    spec: BuildSpec,
    *,
    name: str,
    unchanged: bool,
    same_scales: bool,
    host_code: bool,
) -> tuple[memoryview, int]:
    """Return a full plan, with the weights of `model` in place of its own, and how many were given.

    The parser names layers and transforms weights as it did for the build, so they are given as the network has them.

    Args:
        model: an ONNX file of the graph that the plan was built from, apart from its weights.
        name, host_code: as of `Generation.load`.
        unchanged: these are the weights that it was built from: those that the plan has for itself stay.
        same_scales: the scales of activations are, too.

    Raises: as `Generation.load`, and UnsupportedRequest, which lists the weights that only one of the two has.
    """
    device, trt = generation.device(spec), generation.module
    with current_gpu(device.ordinal if device else 0):
        engine = generation.load(plan, name, host_code=host_code).engine
        # 10.6 says no of a plan that takes the very weights that it was built from.
        if not (engine.refittable or unchanged):
            raise UnsupportedRequest(f"{name} can't take other weights", ["build it again with `refit=True`"])
        with generation.parsed(model, typed=generation.typed(spec)) as (objects, messages):
            try:
                refitter = generation.native(trt.Refitter, messages, f"refit {name}", engine)
                weights = dict(parsing.network_weights(trt, objects.network))
                count, problems = _give_weights(refitter, weights, unchanged, same_scales)
                if problems:
                    listing = first_of(problems, 5)
                    why = (
                        f"it lets {listing} not be replaced, or the model lacks them: build an engine of the new model"
                    )
                    raise UnsupportedRequest(f"{generation} can't put all weights into {name}", [why])
                if not refitter.refit_cuda_engine():
                    raise translate(messages.errors, f"{generation} can't refit {name}", BackendError)
                whole_forms = "strip" in generation.capabilities.options  # 8.6 knows one form
                new = _serialized(trt, engine, spec.refit) if whole_forms else engine.serialize()
                return memoryview(new).cast("B"), count
            finally:
                refitter = None  # it uses the engine


def _give_weights(
    refitter: Any, weights: Mapping[Any, Any], unchanged: bool, same_scales: bool
) -> tuple[int, list[str]]:
    """Give a refitter all weights that it asks for; return how many, and the names of those that one of the two lacks."""
    asked = list(zip(*refitter.get_all(), strict=True))
    lacking = [key for key in asked if key not in weights]
    if not unchanged:
        # What the plan keeps for itself, perhaps scales of weights, would stay the old one.
        own = weights.keys() - {*asked}
        lacking += [key for key in own if parsing.may_change(weights[key], scalars=not same_scales)]
    given = {key: parsing.as_weights(weights[key]) for key in asked if key in weights}
    refused = [key for key, values in given.items() if not refitter.set_weights(*key, values)]
    lacking += zip(*refitter.get_missing(), strict=True) if not (lacking or refused) else ()
    return len(asked), sorted({f"{layer} ({role.name.lower()})" for layer, role in (*lacking, *refused)})


def _serialized(trt: Any, engine: Any, refit: bool) -> Any:
    """Return the plan of an engine with its weights; `refit`: they can be replaced again."""
    config, flags = engine.create_serialization_config(), trt.SerializationFlag
    config.clear_flag(flags.EXCLUDE_WEIGHTS)
    if refit and "INCLUDE_REFIT" in flags.__members__:  # before there was this flag, a plan stayed refittable
        config.set_flag(flags.INCLUDE_REFIT)
    return engine.serialize_with_config(config)
