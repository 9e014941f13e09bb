"""Cross entropy of `linear(hidden, weight, bias)`, chunk by chunk of tokens.

    forward     for each chunk    logits [chunk, V]  ->  losses [chunk], log of the sum of exponentials [chunk]
    backward    for each chunk    logits again  ->  their gradient  ->  rows of dhidden, a term of dweight

Of N tokens F.cross_entropy keeps [N, V] logits, and makes [N, V] more in fp32 on the way. Here two such tensors of one
chunk exist at a time, and `hidden` and N numbers are kept, for one more product with the weight.

In a cube whose ranks run the step alike each of them does this for its share of the tokens, in forward and backward;
all get all losses. There each loss counts 1/ranks, and gradients are summed: a rank gives those of its own tokens.
"""

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lightning_hanayo.chunked_loss.token_shares import token_shares
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.linear_modules import as_autocast

if TYPE_CHECKING:
    from lightning_hanayo.tensor_parallel.mesh import MeshAxis

CHUNK = 1024
"""tokens"""
is_repeated: ContextVar[bool] = ContextVar("is_repeated", default=False)
"""whether the backward will compute again what is computed now: for a plan, which counts forwards"""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int = CHUNK,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)`, without whole logits.

    Of tensors in fp64 all is computed in fp64. Gradients can't be differentiated again.

    Example:
        >>> loss = chunked_cross_entropy(self.norm(x), self.token.weight, batch["labels"])

    Args:
        hidden: [..., H].
        weight: [V, H], of the head.
        labels: [...], integers below V, or `ignore_index`.
        bias: [V], of the head.
        chunk: for how many tokens logits are made at a time: 2 x chunk x V x 4 bytes.
        ignore_index: the label of tokens that don't count.
        label_smoothing: the share of the target that all V get equal parts of, as in `F.cross_entropy`.
        reduction: "mean" over the labels that count, "sum", or "none".

    Returns:
        A scalar, or [...] for "none"; in fp32, or in fp64.

    Raises:
        HanayoError: shapes that don't belong together, or a bad number.
    """
    if hidden.shape[:-1] != labels.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise HanayoError(
            f"chunked_cross_entropy: hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels "
            f"{list(labels.shape)}: expected [..., H], [V, H] and [...]"
        )
    check_chunk(chunk)
    if not 0 <= label_smoothing <= 1:
        raise HanayoError(f"chunked_cross_entropy: label_smoothing={label_smoothing!r}: expected a number from 0 to 1")
    if reduction not in ("mean", "sum", "none"):
        raise HanayoError(f"chunked_cross_entropy: reduction={reduction!r}: expected 'mean', 'sum' or 'none'")
    flat, targets = as_autocast(hidden).flatten(0, -2), labels.flatten()
    operands = [None if one is None else one.to(flat.dtype) for one in (weight, bias)]
    rule = _Rule(chunk, ignore_index, label_smoothing, token_shares())
    losses: Tensor = _TokenLosses.apply(flat, *operands, targets, rule)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / (targets != ignore_index).sum() if reduction == "mean" else losses.sum()


def check_chunk(chunk: Any) -> None:
    """Check a number of tokens.

    Raises:
        HanayoError: it is none.
    """
    if not isinstance(chunk, int) or chunk < 1:
        raise HanayoError(f"chunk={chunk!r}: expected a whole number of tokens, at least 1")


@dataclass(frozen=True)
class _Rule:
    """How losses are made: of which tokens, how many at a time."""

    chunk: int
    ignored: int
    smoothing: float
    shares: "MeshAxis | None"

    def own(self, num_tokens: int) -> slice:
        """This rank's tokens."""
        if self.shares is None:
            return slice(0, num_tokens)
        length = -(-num_tokens // self.shares.size)
        start, stop = (min(rank * length, num_tokens) for rank in (self.shares.rank, self.shares.rank + 1))
        return slice(start, stop)

    def chunks(self, num_own: int) -> Iterator[slice]:
        """The parts of this rank's tokens whose logits exist at a time."""
        for start in range(0, num_own, self.chunk):
            yield slice(start, min(start + self.chunk, num_own))

    def all_gather(self, own: Tensor, num_tokens: int) -> Tensor:
        """This rank's rows to those of all tokens, [num_tokens, ...]."""
        if self.shares is None:
            return own
        part = own.new_zeros(-(-num_tokens // self.shares.size), *own.shape[1:])
        part[: len(own)] = own
        rows: Tensor = self.shares.all_gather(part).wait().flatten(0, 1)
        return rows[:num_tokens]


class _TokenLosses(torch.autograd.Function):
    """[N, H], [V, H], [V], [N] to the loss of each token, [N]. Of `hidden` a rank keeps the rows of its own tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rule: _Rule) -> Tensor:
        ctx.rule, ctx.num_tokens = rule, len(hidden)
        own = rule.own(len(hidden))
        hidden, labels = hidden[own] if rule.shares is None else hidden[own].clone(), labels[own]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        losses, log_sums = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        for rows in rule.chunks(len(hidden)):
            token = is_repeated.set(True)
            logits = functional.linear(hidden[rows], weight, bias).to(dtype)
            is_repeated.reset(token)
            counts = labels[rows] != rule.ignored
            of_label = logits.gather(1, labels[rows].where(counts, 0)[:, None])[:, 0]
            log_sums[rows] = logits.logsumexp(1)
            wanted = (
                of_label if not rule.smoothing else of_label * (1 - rule.smoothing) + logits.mean(1) * rule.smoothing
            )
            losses[rows] = (log_sums[rows] - wanted).where(counts, 0.0)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        return rule.all_gather(losses, ctx.num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        rule: _Rule = ctx.rule
        tokens = rule.own(ctx.num_tokens)
        gradient = gradient[tokens] * (1 if rule.shares is None else rule.shares.size)  # the others' are as large
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dtype = log_sums.dtype
        dhidden = hidden.new_zeros(ctx.num_tokens, hidden.shape[1]) if needs_hidden else None
        own_dhidden = None if dhidden is None else dhidden[tokens]
        dweight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        dbias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        for rows in rule.chunks(len(hidden)):
            logits = functional.linear(hidden[rows], weight, bias).to(dtype)
            dlogits = logits.sub_(log_sums[rows, None]).exp_()
            if rule.smoothing:
                dlogits -= rule.smoothing / weight.shape[0]
            counts = labels[rows] != rule.ignored
            of_label = counts.to(dtype) * (rule.smoothing - 1)
            dlogits.scatter_add_(1, labels[rows].where(counts, 0)[:, None], of_label[:, None])
            dlogits *= gradient[rows].where(counts, 0.0)[:, None]
            low = dlogits.to(hidden.dtype)
            if own_dhidden is not None:
                torch.mm(low, weight, out=own_dhidden[rows])
            if dweight is not None:
                dweight += low.t().mm(hidden[rows])
            if dbias is not None:
                dbias += dlogits.sum(0)
        return (
            dhidden,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            None,
            None,
        )
