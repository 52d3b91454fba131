"""Other weights in an engine: a refitter given a network's, and the plan written again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtopt.trt import parsing


def give_weights(
    trt: Any, refitter: Any, weights: Mapping[Any, Any], unchanged: bool, same_scales: bool
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


def serialized(trt: Any, engine: Any, refit: bool) -> Any:
    """Return the plan of an engine with its weights; `refit`: they can be replaced again."""
    config, flags = engine.create_serialization_config(), trt.SerializationFlag
    config.clear_flag(flags.EXCLUDE_WEIGHTS)
    if refit and "INCLUDE_REFIT" in flags.__members__:  # before there was this flag, a plan stayed refittable
        config.set_flag(flags.INCLUDE_REFIT)
    return engine.serialize_with_config(config)
