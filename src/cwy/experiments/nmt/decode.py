"""Translations: the likeliest word at every step, or the likeliest of several sentences (beam search)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops._precision import full_precision
from .model import Translator
from .text import END, PAD, START, UNKNOWN


@torch.no_grad()
def decode(model: Translator, source: Tensor, limit: int, beams: int = 1) -> list[list[int]]:
    """The words of a translation of each sentence, without the end.

    Args:
        source: ``(B, S)``, sentences with their ends, padded.
        limit: the most words of a translation.
        beams: how many sentences are followed at once; 1 is greedy. The one with the best mean log-probability a word wins.
    """
    with full_precision(source.device.type):
        return _search(model, source, limit, beams)


def _search(model: Translator, source: Tensor, limit: int, beams: int) -> list[list[int]]:
    batch, device = len(source), source.device
    state, reader = model.read(source)
    reader = reader.repeated(beams)
    state = tuple(part.repeat_interleave(beams, 0) for part in state)
    words = torch.full((batch * beams, 1), START, device=device)
    # At first all beams are alike, and one is enough.
    scores = torch.full((batch, beams), -torch.inf, dtype=model.score.dtype, device=device)
    scores[:, 0] = 0
    # What follows an end is padding, and costs nothing; what is never said; and, at the limit, the end alone.
    over, end = scores.new_full((2, len(model.target.weight)), -torch.inf)
    never = torch.zeros_like(over)
    over[PAD] = end[END] = 0
    never[[PAD, START, UNKNOWN]] = -torch.inf
    first = torch.arange(batch, device=device).unsqueeze(1) * beams
    ended = torch.zeros(batch * beams, dtype=torch.bool, device=device)
    for count in range(limit + 1):
        state, _ = reader.advance(reader.inputs(words[:, -1]), state)
        told = (model.readout(state[0]) + never).log_softmax(-1)
        told = torch.where(ended.unsqueeze(1), over, told if count < limit else told + end)
        scores, best = (scores.unsqueeze(-1) + told.view(batch, beams, -1)).flatten(1).topk(beams)
        parents = (first + best // told.shape[-1]).flatten()
        words = torch.cat([words[parents], (best % told.shape[-1]).view(-1, 1)], 1)
        state = tuple(part[parents] for part in state)
        ended = (words[:, -1] == END) | (words[:, -1] == PAD)
        if ended.all():
            break
    words = words[:, 1:].view(batch, beams, -1)
    winners = (scores / (words != PAD).sum(-1)).argmax(1)
    chosen = words[torch.arange(batch, device=device), winners].tolist()
    return [[word for word in sentence if word not in (END, PAD)] for sentence in chosen]
