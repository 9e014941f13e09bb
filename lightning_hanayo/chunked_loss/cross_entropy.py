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

Lets causal models of transformers compute their loss chunk by chunk of tokens, unchanged.

    hidden -> lm_head -> logits -> loss_function(logits, labels)        the model's forward
              |          |         `-- takes hidden and weight from the logits, if they haven't been made
              |          `-- a tensor that makes its values when something computes with them
              `-- its forward, which `chunk_loss` replaces on the instance

So `outputs.logits` is there for whoever asks for it, in the usual memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_map

from lightning_hanayo.chunked_loss.token_shares import HeldByRows, OwnRows, token_shares
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.linear_modules import as_autocast
from lightning_hanayo.partial_values import METADATA, OF_DEVICE, OF_OBJECT, name_of, plain_alias

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


_WITHOUT_VALUES = METADATA - OF_DEVICE - OF_OBJECT
_LOSS = "ForCausalLMLoss"


def chunk_loss(model: nn.Module, chunk: int = CHUNK) -> nn.Module:
    """Let a causal model of transformers compute its loss without whole logits: with `labels` among its arguments.

    Call it where the model is built. Its head stays an `nn.Linear` with the same weight, also a tied one.

    Example:
        >>> self.model = chunk_loss(LlamaForCausalLM(config))
        >>> loss = self.model(input_ids=ids, labels=ids).loss

    Args:
        model: such as `LlamaForCausalLM` or `GPT2LMHeadModel`.
        chunk: for how many tokens logits are made at a time.

    Returns:
        The model itself.

    Raises:
        HanayoError: a bad number.
        UnsupportedError: the model has no linear head, or a loss of its own.
    """
    check_chunk(chunk)
    head, loss = _head_and_loss(model)
    if not _is_causal(head, loss) or "forward" in vars(head):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise UnsupportedError(
            f"chunk_loss: {type(model).__name__} has the head {type(head).__name__} and the loss {name}; expected "
            f"nn.Linear and {_LOSS}. Call lightning_hanayo.chunked_cross_entropy in your step instead."
        )
    _chunk_loss(head, model, loss, chunk, object.__setattr__)
    return model


def has_causal_models(module: nn.Module) -> bool:
    """Whether `chunk_losses` knows a model in the module, or `chunk_loss` has changed one."""
    return any(_is_causal(*_head_and_loss(part)) for part in module.modules())


def chunk_losses(module: nn.Module, set_attribute: Callable[[Any, str, Any], None], chunk: int = CHUNK) -> None:
    """Let all causal models of transformers in a module compute their losses without whole logits.

    Args:
        module: whose other models stay as they are, and those that `chunk_loss` has changed.
        set_attribute: sets an attribute of an instance, and may take it back later.
        chunk: for how many tokens logits are made at a time.
    """
    for part in module.modules():
        head, loss = _head_and_loss(part)
        if _is_causal(head, loss) and "forward" not in vars(head):
            _chunk_loss(head, part, loss, chunk, set_attribute)


def _head_and_loss(model: nn.Module) -> tuple[Any, Any]:
    """The head of a model of transformers, and its loss function; None for a missing one.

    A wrapper may pass on both of the model inside it, and isn't such a model.
    """
    if not hasattr(type(model), "get_output_embeddings"):
        return None, None
    head = model.get_output_embeddings()  # type: ignore[operator]
    return head, None if head is None else getattr(model, "loss_function", None)


def _is_causal(head: Any, loss: Any) -> bool:
    return type(head) is nn.Linear and getattr(loss, "__name__", "") == _LOSS


def _chunk_loss(
    head: nn.Linear, model: nn.Module, loss: Any, chunk: int, set_attribute: Callable[[Any, str, Any], None]
) -> None:
    set_attribute(head, "forward", MethodType(forward, head))
    set_attribute(model, "loss_function", ChunkedLoss(loss, chunk))


def forward(head: nn.Linear, input: Tensor) -> Tensor:
    """Takes the place of the head's forward. A function of this module, so that pickle finds it by name."""
    return Logits.of(input, head.weight, head.bias)


class Logits(Tensor):
    """The output of a head: `linear(hidden, weight, bias)`, made when something computes with it."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    _whole: Tensor | None = None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "Logits":
        """Logits [..., V] of [..., H] and [V, H]."""
        shape, dtype = (*hidden.shape[:-1], weight.shape[0]), as_autocast(hidden).dtype
        with unset_fake_temporarily():  # while a plan counts operations: a fake tensor can be of no other class
            made: Logits = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Logits)
        made.hidden, made.bias = hidden, bias
        made.weight = weight.kept() if isinstance(weight, HeldByRows) else weight
        return made

    @property
    def is_made(self) -> bool:
        """Whether something has computed with the values."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """The values, made once."""
        if self._whole is None:
            self._whole = functional.linear(self.hidden, self.weight, self.bias)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read attributes that need no values; compute with the values otherwise."""
        name = name_of(func, args, kwargs)
        if name in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "device":
            return args[0].hidden.device
        if name == "contiguous" and len(args) == 1 and not kwargs:  # some models call this before the loss
            return args[0]
        args, kwargs = tree_map(_made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Describe it: a debugger that shows variables makes no logits."""
        return f"Logits({tuple(self.shape)}, made when they are used)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is a plain tensor."""
        return self.whole().detach().clone()


def _made(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, Logits) else leaf


class ChunkedLoss:
    """Takes the place of a model's `loss_function`."""

    def __init__(self, original: Callable[..., Tensor], chunk: int) -> None:
        self.original = original
        self.chunk = chunk
        self.__name__ = original.__name__

    def __call__(
        self, logits: Tensor, labels: Tensor | None = None, vocab_size: int | None = None, **given: Any
    ) -> Tensor:
        """The mean over the labels that count, or their sum divided by `num_items_in_batch`."""
        if not isinstance(logits, Logits) or logits.is_made or vocab_size not in (None, logits.weight.shape[0]):
            return self.original(_made(logits), labels, vocab_size, **given)
        ignore_index, count = given.get("ignore_index", -100), given.get("num_items_in_batch")
        if (shift_labels := given.get("shift_labels")) is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = chunked_cross_entropy(
            logits.hidden,
            logits.weight,
            shift_labels.to(logits.hidden.device),
            logits.bias,
            chunk=self.chunk,
            ignore_index=ignore_index,
            reduction="mean" if count is None else "sum",
        )
        return loss if count is None else loss / count
