"""What PyTorch's exporter writes in a form that TensorRT can't take, in other words while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_loops(torch: Any) -> Iterator[None]:
    """EmbeddingBag by Gather and a sum, mean or maximum; the exporter makes it a loop over a sequence of tensors."""
    functional = torch.nn.functional
    original = functional.embedding_bag

    def embedding_bag(
        input: Any,
        weight: Any,
        offsets: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Any:
        rows = functional.embedding(input, weight, None, max_norm, norm_type)
        if input.dim() == 2 and padding_idx is None and per_sample_weights is None:
            return {"sum": rows.sum, "mean": rows.mean, "max": rows.amax}[mode](1)
        member = torch.ones_like(input, dtype=torch.bool) if padding_idx is None else input != padding_idx
        if input.dim() == 1:
            starts = offsets[:-1] if include_last_offset else offsets
            place = torch.arange(input.shape[0], device=input.device)
            bag = (place >= starts.unsqueeze(1)).sum(
                0
            ) - 1  # of each row; of bags that start at one place the last has it
            member = (bag == torch.arange(starts.shape[0], device=input.device).unsqueeze(1)) & member
            if include_last_offset:
                member = member & (place < offsets[-1])
        if mode == "max":
            # All bags have a copy of all rows where offsets cut them: a maximum can't be taken by a product.
            largest = torch.where(member.unsqueeze(-1), rows, -65504.0).amax(-2)  # FP16's lowest
            return torch.where(member.any(-1, keepdim=True), largest, 0.0)
        shares = member.to(rows.dtype)
        if per_sample_weights is not None:
            shares = shares * per_sample_weights
        total = shares @ rows if input.dim() == 1 else (shares.unsqueeze(-1) * rows).sum(-2)
        return total if mode == "sum" else total / member.sum(-1, keepdim=True).clamp(min=1)

    functional.embedding_bag = embedding_bag
    try:
        yield
    finally:
        functional.embedding_bag = original


@contextlib.contextmanager
def attention_on_four_axes(torch: Any) -> Iterator[None]:
    """Attention over windows (five axes) or without heads (three) as that of samples × heads, all that the exporter knows."""
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
        if query.dim() == key.dim() == value.dim() == 4 or query.dim() < 3:
            return original(query, key, value, attn_mask, *args, **options)
        heads = 1 if query.dim() == 3 else 2  # the axes, from the last but two on, that stay
        before = torch.broadcast_shapes(*(item.shape[: -1 - heads] for item in (query, key, value)))

        def flat(item: Any) -> Any:
            item = item.expand(*before, *item.shape[-1 - heads :]).flatten(0, len(before) - 1)
            return item.unsqueeze(1) if heads == 1 else item

        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = flat(attn_mask if attn_mask.dim() > heads + 1 else attn_mask.unsqueeze(0))
        result = original(flat(query), flat(key), flat(value), attn_mask, *args, **options)
        return (result.squeeze(1) if heads == 1 else result).unflatten(0, before)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original
