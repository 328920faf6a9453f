"""The translator: an encoder, additive attention, a decoder."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops._precision import full_precision
from ..engine.config import ConfigError
from .cells import Encoder, State, Step, cell, step
from .recipes import NmtConfig
from .shared import Shared
from .text import PAD, SPECIAL, Vocabulary


class Memory(NamedTuple):
    """What the decoder knows of the source.

    Attributes:
        keys: $W_1 h_i$, ``(B, S, N)``.
        values: the context's part of the decoder's input, $W_c h_i$, ``(B, S, K)``.
        mask: ``(B, S)``, 0 for words, -inf beyond the end.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


class Translator(nn.Module):
    r"""A recurrent encoder, and a decoder that attends to its states $h_i$ before every word:

    $$ \alpha_i \propto \exp(v^\top \tanh(W_1 h_i + W_2 s_{t-1})), \quad
       s_t = \mathrm{cell}(\textstyle\sum_i \alpha_i h_i,\ e(y_{t-1});\ s_{t-1}), \quad p(y_t) = \mathrm{softmax}(R s_t + c). $$

    The decoder begins with the encoder's state at the end of the sentence. Words and data are named in the weights.

    Args:
        method, config, dtype: of both recurrences.
        data: the words of both languages and more, as :attr:`~.corpus.Corpus.identity` has them.

    Returns:
        From ``source (B, S)`` and ``given (B, T)``, the words before each wanted one: logits ``(T, B, words)``.
    """

    def __init__(
        self, method: str, config: NmtConfig, data: dict[str, Any], dtype: torch.dtype
    ) -> None:
        super().__init__()
        n, e = config.hidden_size, config.embedding_size
        self.data, self.vocabularies = (
            data,
            [Vocabulary(data[side][len(SPECIAL) :]) for side in ("source", "target")],
        )
        self.source, self.target = (
            nn.Embedding(len(words), e, dtype=dtype) for words in self.vocabularies
        )
        with torch.no_grad():
            self.source.weight.mul_(config.embedding_scale)
            self.target.weight.mul_(config.embedding_scale)
        self.encoder = Encoder(method, config, e, dtype)
        self.decoder = cell(method, config, n + e, dtype)
        self.keys = nn.Linear(n, n, bias=False, dtype=dtype)
        self.query = nn.Linear(n, n, bias=False, dtype=dtype)
        self.score = nn.Parameter(torch.empty(n, dtype=dtype).uniform_(-(n**-0.5), n**-0.5))
        self.readout = nn.Linear(n, len(self.vocabularies[1]), dtype=dtype)

    def forward(self, source: Tensor, given: Tensor) -> Tensor:
        return self.readout(self._rolled(source, given)[0])

    def attention(self, source: Tensor, given: Tensor) -> Tensor:
        """The weights ``(B, T, S)`` of the source's words before each word."""
        return self._rolled(source, given)[1]

    @torch.compiler.disable
    def _rolled(self, source: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """States ``(T, B, N)`` and attention ``(B, T, S)``."""
        with full_precision(source.device.type):
            state, reader = self.read(source)
            states, weights = [], []
            for x in reader.inputs(given.mT):
                state, weight = reader.advance(x, state)
                states.append(state[0])
                weights.append(weight)
            return torch.stack(states), torch.cat(weights, 1)

    def read(self, source: Tensor) -> tuple[State, Reader]:
        """Reads ``source (B, S)``: the decoder's first state, and the steps that follow."""
        real = source != PAD
        states, state = self.encoder(self.source(source.mT), real)
        states, core = states.transpose(0, 1), step(self.decoder)
        values = nn.functional.linear(states, core.weight[:, : states.shape[-1]])
        mask = torch.zeros_like(source, dtype=states.dtype).masked_fill(~real, -torch.inf)
        return state, Reader(self, Memory(self.keys(states), values, mask), core)

    def get_extra_state(self) -> Tensor:
        return torch.frombuffer(
            bytearray(json.dumps(self.data, ensure_ascii=False).encode()), dtype=torch.uint8
        )

    def set_extra_state(self, state: Tensor) -> None:
        # Weights of earlier versions do not know all of it.
        if not data_of(state).items() <= self.data.items():
            raise ConfigError(
                "the weights belong to other data: the file, or how it is split, has changed since."
            )


def data_of(state: Tensor) -> dict[str, Any]:
    """The data that weights belong to, from their extra state."""
    return json.loads(bytes(state.tolist()))


class Reader:
    """The decoder's steps over one memory: weights are read, and Q is formed, once.

    Args:
        model: whose decoder it is.
        memory: what to attend to.
        core: the decoder's cell.
    """

    def __init__(self, model: Translator, memory: Memory, core: Step) -> None:
        self._model, self._core = model, core
        self._sizes = len(model.query.weight), len(core.transition)
        # The state is multiplied for the query and for the next state at once.
        self._times = Shared(torch.cat([model.query.weight, core.transition]).mT)
        self._memory, self._mix = memory, Shared(memory.values)

    def repeated(self, times: int) -> Reader:
        """The same for each sentence so many times, one after another."""
        return Reader(
            self._model,
            Memory(*(part.repeat_interleave(times, 0) for part in self._memory)),
            self._core,
        )

    def inputs(self, words: Tensor) -> Tensor:
        """The words' part ``(*, K)`` of the cell's input."""
        weight = self._core.weight[:, -self._model.target.embedding_dim :]
        return nn.functional.linear(self._model.target(words), weight, self._core.bias)

    def advance(self, x: Tensor, state: State) -> tuple[State, Tensor]:
        """One word ``(B, K)``: the next state, and the attention ``(B, 1, S)`` that led to it."""
        query, rest = self._times(state[0]).split(self._sizes, -1)
        scores = (
            torch.tanh(self._memory.keys + query.unsqueeze(1)) @ self._model.score
            + self._memory.mask
        )
        weights = scores.softmax(-1).unsqueeze(1)
        return self._core.advance(x + self._mix(weights).squeeze(1), rest, state), weights
