"""The translator: an encoder, additive attention, a decoder."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from ...many import together
from ...ops._precision import autocast_dtype, without_tf32
from ..engine.config import ConfigError
from . import fused
from .cells import ALIGNED, CellWeights, Encoder, GatedCell, cell, read_weights
from .pointwise import Pointwise, State
from .recipes import NmtConfig
from .repeated_product import RepeatedProduct
from .text import PAD, SPECIAL, Vocabularies, Vocabulary


class Memory(NamedTuple):
    """Hold the source as the decoder attends to it.

    Attributes:
        entries: for each word the key $W_1 h_i$, and then the context's part of the decoder's
            input, $W_c h_i$, ``(S, B, N + C)``.
        real: ``(B, S)``, true up to the end of a sentence.
    """

    entries: Tensor
    real: Tensor


class Translator(nn.Module):
    r"""Encode a sentence, and decode with attention to the states $h_i$ before every word.

    $$ \alpha_i \propto \exp(v^\top \tanh(W_1 h_i + W_2 s_{t-1})), \quad
       s_t = \mathrm{cell}(\textstyle\sum_i \alpha_i h_i,\ e(y_{t-1});\ s_{t-1}), \quad
       p(y_t) = \mathrm{softmax}(R s_t + c). $$

    The decoder starts from the encoder's state at the end of the sentence. The state dict holds
    the words and the identity of the data.

    Args:
        method, config, dtype: of both recurrences.
        data: the words of both languages and more, as :attr:`~.corpus.Corpus.identity` has them.

    Returns:
        Logits ``(T, B, words)`` of ``source (B, S)`` and ``given (B, T)``, the word before each
        predicted one.
    """

    def __init__(
        self, method: str, config: NmtConfig, data: dict[str, Any], dtype: torch.dtype
    ) -> None:
        super().__init__()
        n = config.hidden_size
        e = config.embedding_size
        self.data = data
        self.vocabularies = Vocabularies(
            source=Vocabulary(data["source"][len(SPECIAL) :]),
            target=Vocabulary(data["target"][len(SPECIAL) :]),
        )
        self.source = nn.Embedding(len(self.vocabularies.source), e, dtype=dtype)
        self.target = nn.Embedding(len(self.vocabularies.target), e, dtype=dtype)
        with torch.no_grad():
            self.source.weight.mul_(config.embedding_scale)
            self.target.weight.mul_(config.embedding_scale)
        self.encoder = Encoder(method, config, e, dtype)
        self.decoder = cell(method, config, n + e, e, dtype)
        self.keys = nn.Linear(n, n, bias=False, dtype=dtype)
        self.query = nn.Linear(n, n, bias=False, dtype=dtype)
        self.score = nn.Parameter(torch.empty(n, dtype=dtype).uniform_(-(n**-0.5), n**-0.5))
        self.readout = nn.Linear(n, len(self.vocabularies.target), dtype=dtype)
        if config.zero_readout:
            nn.init.zeros_(self.readout.weight)
            nn.init.zeros_(self.readout.bias)
        self.dropout = nn.Dropout(config.dropout or 0.0)

    def forward(self, source: Tensor, given: Tensor) -> Tensor:
        states, _ = self._rolled(source, given)
        return self._read_out(self.dropout(states))

    def _read_out(self, states: Tensor) -> Tensor:
        """Return the logits of states.

        Under autocast words without a meaning are added, and cut off again, so that the product has
        the best sides.
        """
        half = autocast_dtype(self.readout.weight)
        missing = -len(self.vocabularies.target) % ALIGNED
        if missing == 0 or half == self.readout.weight.dtype:
            return self.readout(states)
        weight = pad(self.readout.weight.to(half), (0, 0, 0, missing))
        bias = pad(self.readout.bias.to(half), (0, missing))
        return linear(states, weight, bias)[..., :-missing]

    def states(self, source: Tensor, given: Tensor) -> Tensor:
        """Return the decoder's states ``(T, B, N)`` after each word."""
        states, _ = self._rolled(source, given)
        return states

    def attention(self, source: Tensor, given: Tensor) -> Tensor:
        """Return the attention ``(B, T, S)`` to the source's words before each word.

        It has no gradient.
        """
        _, weights = self._rolled(source, given)
        return weights

    @torch.compiler.disable
    def _rolled(self, source: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return states ``(T, B, N)`` and attention ``(B, T, S)``."""
        with without_tf32(source.device.type):
            state, reader = self.read(source)
            return reader.rolled(reader.inputs(given.mT), state)

    def read(self, source: Tensor) -> tuple[State, Reader]:
        """Encode ``source (B, S)``. Return the decoder's first state, and its steps."""
        real = source != PAD
        embedded = self.dropout(self.source(source.mT))
        with self._forming():
            states, state = self.encoder(embedded, real)
            weights = read_weights(self.decoder, self.target.embedding_dim)
        # Under autocast products are in half precision, and the states of the decoder are not.
        state = tuple(part.to(self.score.dtype) for part in state)
        entries = linear(states, torch.cat([self.keys.weight, weights.context_map]))
        return state, Reader(self, Memory(entries, real), weights)

    def _forming(self) -> AbstractContextManager[None]:
        """Return a context in which one call forms the transitions of encoder and decoder.

        A plain encoder may not form its transition at all.
        """
        if isinstance(self.encoder.core, GatedCell):
            return together(self)
        return nullcontext()

    def get_extra_state(self) -> Tensor:
        text = json.dumps(self.data, ensure_ascii=False)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        # Weights of earlier versions hold a part of the data's identity.
        if not data_of(state).items() <= self.data.items():
            raise ConfigError(
                "the weights belong to other data: the file, or how it is split, has changed since."
            )


def data_of(state: Tensor) -> dict[str, Any]:
    """Read the identity of the data from the extra state of weights."""
    return json.loads(bytes(state.tolist()))


class Reader:
    """Advance the decoder over one memory. Weights are read, and Q is formed, once.

    Args:
        model: the translator.
        memory: the source to attend to.
        weights: those of the decoder's cell.
    """

    def __init__(self, model: Translator, memory: Memory, weights: CellWeights) -> None:
        self._model = model
        self._weights = weights
        self._memory = memory
        # One product with the state serves the query and the next state.
        matrix = torch.cat([model.query.weight, weights.transition])
        self._matrix = matrix.to(autocast_dtype(matrix))

    def repeated(self, times: int) -> Reader:
        """Return a reader of a batch that repeats each sentence, as beam search needs."""
        memory = Memory(
            entries=self._memory.entries.repeat_interleave(times, 1),
            real=self._memory.real.repeat_interleave(times, 0),
        )
        return Reader(self._model, memory, self._weights)

    def inputs(self, words: Tensor) -> Tensor:
        """Return the words' part ``(*, K)`` of the cell's input."""
        return self._weights.map_words(self._model.dropout(self._model.target(words)))

    def rolled(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Advance by all words ``(T, B, K)``.

        Returns:
            The states ``(T, B, N)``, and the attention ``(B, T, S)`` without a gradient.
        """
        real = self._memory.real
        if fused.serves(x, self._matrix, positions=real.shape[1]):
            source = fused.Source(
                entries=self._memory.entries,
                score=self._model.score,
                lengths=real.sum(1, dtype=torch.int32),
            )
            states, weights = fused.roll(x, self._matrix, self._weights.pointwise, state, source)
            assert weights is not None
            return states, weights.transpose(0, 1)
        stepper = self.stepper()
        steps = []
        maps = []
        for row in x:
            state, weight = stepper.advance(row, state)
            steps.append(state[0])
            maps.append(weight.detach())
        return torch.stack(steps), torch.cat(maps, 1)

    def stepper(self) -> Stepper:
        """Return what advances word by word, with or without gradients as in the caller."""
        return Stepper(self._memory, self._matrix, self._model.score, self._weights.pointwise)


class Stepper:
    """Advance the decoder word by word.

    Args:
        memory: the source to attend to.
        matrix: of the query above that of the state.
        score: v ``(N,)``.
        pointwise: the cell after its products.
    """

    def __init__(self, memory: Memory, matrix: Tensor, score: Tensor, pointwise: Pointwise) -> None:
        n = len(score)
        beyond = ~memory.real.mT
        mask = torch.zeros_like(beyond, dtype=memory.entries.dtype)
        self._mask = mask.masked_fill(beyond, -torch.inf)
        self._keys = memory.entries[..., :n].contiguous()
        self._contexts = RepeatedProduct(memory.entries[..., n:].transpose(0, 1).contiguous())
        self._score = RepeatedProduct(score.unsqueeze(-1))
        self._times = RepeatedProduct(matrix.mT)
        self._pointwise = pointwise

    def advance(self, x: Tensor, state: State) -> tuple[State, Tensor]:
        """Advance by a word ``(B, K)``. Return the next state and the attention ``(B, 1, S)``."""
        n = self._keys.shape[-1]
        query, recurrent = self._times(state[0]).tensor_split([n], -1)
        matched = torch.tanh(self._keys + query)
        scores = self._score(matched.flatten(0, 1)).view(self._mask.shape)
        weights = (scores + self._mask).softmax(0).mT.unsqueeze(1)
        context = self._contexts(weights).squeeze(1)
        state = self._pointwise.advance(x, context, recurrent.to(x.dtype), state)
        return state, weights
