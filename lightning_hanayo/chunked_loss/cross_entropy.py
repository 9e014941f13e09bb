"""Cross entropy of `linear(hidden, weight, bias)`, chunk by chunk of tokens.

    forward     for each chunk    logits [chunk, V]  ->  losses [chunk], log of the sum of exponentials [chunk]
    backward    for each chunk    logits again  ->  their gradient  ->  rows of dhidden, a term of dweight

Of N tokens F.cross_entropy keeps [N, V] logits, and makes [N, V] more in fp32 on the way. Here two such tensors of one
chunk exist at a time, and `hidden` and N numbers are kept, for one more product with the weight.

In a cube whose ranks run the step alike each of them does this for its share of the tokens, in forward and backward;
all get all losses. There each loss counts 1/ranks, and gradients are summed: a rank gives those of its own tokens.

If each rank holds some rows of the weight, it does this with its own rows instead, for all tokens:

    forward     own logits [chunk, V/n]  ->  log of the sum of exponentials, the label's logit: gathered once, [n, 2, N]
    backward    own logits again  ->  all of the own rows' dweight, this rank's term of dhidden; nothing is sent
"""

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lightning_hanayo.chunked_loss.token_shares import HeldByRows, OwnRows, token_shares
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.partial_values import plain_alias

if TYPE_CHECKING:
    from lightning_hanayo.tensor_parallel.mesh import MeshAxis

CHUNK = 1024
"""tokens"""
is_in_loss: ContextVar[bool] = ContextVar("is_in_loss", default=False)
"""whether such a loss is computed now: a plan counts it apart, as ranks may share it and its backward repeats it"""


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
    shares, size = token_shares(), weight.shape[0]
    rows = weight.own_rows() if isinstance(weight, HeldByRows) else None
    rule = _Rule(chunk, ignore_index, label_smoothing, size, shares if rows is None else None, rows)
    bias = None if bias is None else bias.to(flat.dtype)
    token = is_in_loss.set(True)
    try:  # autograd adds to own rows, so they aren't cast here
        weight = weight.to(flat.dtype) if rows is None else rows.part
        losses: Tensor = _TokenLosses.apply(flat, weight, bias, targets, rule)  # type: ignore[no-untyped-call]
    finally:
        is_in_loss.reset(token)
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
    """How losses are made: of which tokens, how many at a time, with which rows of the weight."""

    chunk: int
    ignored: int
    smoothing: float
    size: int
    """of the vocabulary"""
    shares: "MeshAxis | None"
    rows: OwnRows | None

    @property
    def num_ranks(self) -> int:
        """That share the loss."""
        ranks = self.shares if self.rows is None else self.rows.ranks
        return 1 if ranks is None else ranks.size

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

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each label in this rank's logits, [N, 1], and whether there is one, and the label counts."""
        counts = labels != self.ignored
        columns, is_own = labels.where(counts, 0), counts
        if self.rows is not None:
            columns, is_own = self.rows.find(columns)
            is_own = is_own & counts
        return columns[:, None], is_own

    def own_bias(self, bias: Tensor | None) -> Tensor | None:
        """The entries of the bias, or of its gradient, for this rank's logits."""
        if bias is None or self.rows is None:
            return bias
        return bias[self.rows.start : self.rows.start + self.rows.num_rows]

    def over_vocabulary(self, found: Tensor) -> Tensor:
        """[k, N] of this rank's logits to that of all: log of the sum of exponentials, and sums."""
        if self.rows is None:
            return found
        parts = self.rows.ranks.all_gather(found).wait()
        return torch.cat([parts[:, :1].logsumexp(0), parts[:, 1:].sum(0)])

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
        weight = weight if rule.rows is None else plain_alias(weight)
        own = rule.own(len(hidden))
        hidden, labels = hidden[own] if rule.shares is None else hidden[own].clone(), labels[own]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        found = hidden.new_empty(3 if rule.smoothing else 2, len(hidden), dtype=dtype)
        cast, own_bias = weight.to(hidden.dtype), rule.own_bias(bias)
        for rows in rule.chunks(len(hidden)):
            logits = functional.linear(hidden[rows], cast, own_bias).to(dtype)
            found[0, rows] = logits.logsumexp(1)
            columns, is_own = rule.columns(labels[rows])
            found[1, rows] = logits.gather(1, columns)[:, 0].where(is_own, 0.0) if len(weight) else 0.0
            if rule.smoothing:
                found[2, rows] = logits.sum(1)
        log_sums, wanted, *sums = rule.over_vocabulary(found)
        for total in sums:
            wanted = wanted * (1 - rule.smoothing) + total * (rule.smoothing / rule.size)
        losses = (log_sums - wanted).where(labels != rule.ignored, 0.0)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        return rule.all_gather(losses, ctx.num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        rule: _Rule = ctx.rule
        tokens = rule.own(ctx.num_tokens)
        gradient = gradient[tokens] * rule.num_ranks  # the others' are as large
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dtype = log_sums.dtype
        dhidden = hidden.new_zeros(ctx.num_tokens, hidden.shape[1]) if needs_hidden else None
        own_dhidden = None if dhidden is None else dhidden[tokens]
        dweight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        dbias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        cast, own_bias, own_dbias = weight.to(hidden.dtype), rule.own_bias(bias), rule.own_bias(dbias)
        for rows in rule.chunks(len(hidden)):
            logits = functional.linear(hidden[rows], cast, own_bias).to(dtype)
            dlogits = logits.sub_(log_sums[rows, None]).exp_()
            if rule.smoothing:
                dlogits -= rule.smoothing / rule.size
            columns, is_own = rule.columns(labels[rows])
            if len(weight):
                dlogits.scatter_add_(1, columns, (is_own.to(dtype) * (rule.smoothing - 1))[:, None])
            dlogits *= gradient[rows].where(labels[rows] != rule.ignored, 0.0)[:, None]
            low = dlogits.to(hidden.dtype)
            if own_dhidden is not None:
                torch.mm(low, cast, out=own_dhidden[rows])
            if dweight is not None:
                dweight += low.t().mm(hidden[rows])
            if own_dbias is not None:
                own_dbias += dlogits.sum(0)
        sums = ((dweight, weight), (dbias, bias))
        return dhidden, *(None if one is None else one.to(own.dtype) for one, own in sums), None, None
