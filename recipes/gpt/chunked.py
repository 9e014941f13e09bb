"""The GPT for long sequences and large vocabularies: its training makes the logits of some tokens at a time."""

from torch import Tensor
from typing_extensions import override

from lightning_hanayo import chunked_cross_entropy
from recipes.gpt.module import GPT


class ChunkedGPT(GPT):
    """Trains as `GPT` does.

    With `cube_outside="tokens"` each rank of a cube computes the logits of its part of the vocabulary.
    """

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return chunked_cross_entropy(self.hidden(batch["input_ids"]), self.token.weight, batch["labels"])
