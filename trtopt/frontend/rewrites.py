"""Replace functions of PyTorch, while a model is traced, whose exported form TensorRT can't take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def in_plain_arithmetic(torch: Any) -> Iterator[None]:
    """Replace functions that the exporter has no form for, or one that TensorRT lacks, while the context is entered."""
    functional = torch.nn.functional

    # By Gather and a sum, mean or maximum; the exporter makes it a loop over a sequence of tensors.
    def embedding_bag(
        input: Any,
        weight: Any,
        offsets: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        *others: Any,
        **options: Any,
    ) -> Any:
        unusual = [value for value in (max_norm, *others, *options.values()) if value not in (None, False)]
        if unusual or (input.dim() == 1 and mode == "max"):
            return originals[functional, "embedding_bag"](
                input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, *others, **options
            )
        rows = functional.embedding(input, weight)
        if input.dim() == 2:
            return {"sum": rows.sum, "mean": rows.mean, "max": rows.amax}[mode](1)
        place = torch.arange(input.shape[0], device=input.device)
        bag = (place >= offsets.unsqueeze(1)).sum(0) - 1  # of each row; of bags that start at one place the last
        member = bag == torch.arange(offsets.shape[0], device=input.device).unsqueeze(1)
        total = member.to(rows.dtype) @ rows
        return total if mode == "sum" else total / member.sum(-1, keepdim=True).clamp(min=1)

    # Over windows (five axes) or without heads (three) as that of samples × heads, all that the exporter knows.
    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
        if query.dim() == key.dim() == value.dim() == 4 or query.dim() < 3:
            return originals[functional, "scaled_dot_product_attention"](query, key, value, attn_mask, *args, **options)
        heads = 1 if query.dim() == 3 else 2  # the axes, from the last but two on, that stay
        before = torch.broadcast_shapes(*(item.shape[: -1 - heads] for item in (query, key, value)))

        def flat(item: Any) -> Any:
            item = item.expand(*before, *item.shape[-1 - heads :]).flatten(0, len(before) - 1)
            return item.unsqueeze(1) if heads == 1 else item

        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = flat(attn_mask if attn_mask.dim() > heads + 1 else attn_mask.unsqueeze(0))
        query, key, value = flat(query), flat(key), flat(value)
        result = originals[functional, "scaled_dot_product_attention"](query, key, value, attn_mask, *args, **options)
        return (result.squeeze(1) if heads == 1 else result).unflatten(0, before)

    def cdist(x1: Any, x2: Any, p: float = 2.0, *args: Any, **options: Any) -> Any:
        if p != 2.0:
            return originals[torch, "cdist"](x1, x2, p, *args, **options)
        return (x1.unsqueeze(-2) - x2.unsqueeze(-3)).square().sum(-1).sqrt()

    def slices(input: Any, size: Any, count: int, dim: int) -> Any:
        """Parts of an open axis (a batch doubled for guidance, two images in one), which the exporter makes a sequence."""
        ends = [*(size * place for place in range(1, count)), input.shape[dim]]
        return tuple(input.narrow(dim, size * place, end - size * place) for place, end in enumerate(ends))

    def chunked(place: Any) -> Any:
        def chunk(input: Any, chunks: int, dim: int = 0) -> Any:
            if isinstance(length := input.shape[dim], torch.SymInt):
                return slices(input, (length + chunks - 1) // chunks, chunks, dim)
            return originals[place, "chunk"](input, chunks, dim)

        return chunk

    def splitting(place: Any) -> Any:
        def split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
            size, length = split_size_or_sections, tensor.shape[dim]
            if isinstance(size, torch.SymInt) and isinstance(length, torch.SymInt):
                return slices(tensor, size, -(-length.node.hint // size.node.hint), dim)
            return originals[place, "split"](tensor, size, dim)

        return split

    def subtracted(place: Any, name: str) -> Any:
        def rsub(input: Any, other: Any, **options: Any) -> Any:
            """`1.0 - mask` of an integer mask, whose type the exporter doesn't promote."""
            if isinstance(other, float) and not (
                input.is_floating_point() or input.is_complex() or input.dtype == torch.bool
            ):
                input = input.to(torch.get_default_dtype())
            return originals[place, name](input, other, **options)

        return rsub

    instead = {
        (torch, "cdist"): cdist,
        **{(place, "chunk"): chunked(place) for place in (torch, torch.Tensor)},
        **{(place, "split"): splitting(place) for place in (torch, torch.Tensor)},
        **{(place, name): subtracted(place, name) for place, name in ((torch, "rsub"), (torch.Tensor, "__rsub__"))},
        (functional, "embedding_bag"): embedding_bag,
        (functional, "scaled_dot_product_attention"): attention,
    }
    originals = {(place, name): getattr(place, name) for place, name in instead}
    try:
        for (place, name), function in instead.items():
            setattr(place, name, function)
        yield
    finally:
        for (place, name), function in originals.items():
            setattr(place, name, function)
