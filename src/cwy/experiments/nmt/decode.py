"""Translate by greedy decoding or beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops._precision import without_tf32
from .model import Translator
from .text import END, PAD, START, UNKNOWN


@torch.no_grad()
def decode(model: Translator, source: Tensor, limit: int, beams: int = 1) -> list[list[int]]:
    """Return the words of a translation of each sentence, without the end.

    Args:
        model: the translator.
        source: ``(B, S)``, sentences with their ends, padded.
        limit: the most words of a translation.
        beams: width of the beam search, 1 for greedy. The sentence with the best mean
            log-probability per word is returned.
    """
    with without_tf32(source.device.type):
        return _search(model, source, limit, beams)


def _search(model: Translator, source: Tensor, limit: int, beams: int) -> list[list[int]]:
    batch = len(source)
    device = source.device
    vocabulary = len(model.target.weight)
    state, reader = model.read(source)
    reader = reader.repeated(beams)
    stepper = reader.stepper()
    state = tuple(part.repeat_interleave(beams, 0) for part in state)
    words = torch.full((batch * beams, 1), START, device=device)
    # All beams are equal at first, and one is enough.
    scores = torch.full((batch, beams), -torch.inf, dtype=model.score.dtype, device=device)
    scores[:, 0] = 0
    # Log-probabilities after an end: padding, at no cost.
    after_end = scores.new_full((vocabulary,), -torch.inf)
    after_end[PAD] = 0
    # Masks to add: only the end is allowed at the limit, and some words never are.
    only_end = scores.new_full((vocabulary,), -torch.inf)
    only_end[END] = 0
    never = scores.new_zeros(vocabulary)
    never[[PAD, START, UNKNOWN]] = -torch.inf
    first = torch.arange(batch, device=device).unsqueeze(1) * beams
    ended = torch.zeros(batch * beams, dtype=torch.bool, device=device)
    for count in range(limit + 1):
        state, _ = stepper.advance(reader.inputs(words[:, -1]), state)
        log_p = (model.readout(state[0]) + never).log_softmax(-1)
        if count == limit:
            log_p = log_p + only_end
        log_p = torch.where(ended.unsqueeze(1), after_end, log_p)
        totals = scores.unsqueeze(-1) + log_p.view(batch, beams, vocabulary)
        scores, best = totals.flatten(1).topk(beams)
        parents = (first + best // vocabulary).flatten()
        words = torch.cat([words[parents], (best % vocabulary).view(-1, 1)], 1)
        state = tuple(part[parents] for part in state)
        ended = (words[:, -1] == END) | (words[:, -1] == PAD)
        if ended.all():
            break
    words = words[:, 1:].view(batch, beams, -1)
    winners = (scores / (words != PAD).sum(-1)).argmax(1)
    chosen = words[torch.arange(batch, device=device), winners].tolist()
    return [[word for word in sentence if word not in (END, PAD)] for sentence in chosen]
