"""A user's script: mypy and pyright accept every line of it in their strict modes."""

from typing import assert_type

import torch
from torch import Tensor, nn

import cwy

layer = cwy.orthogonal(nn.Linear(8, 8), method="cwy", reflections=4, init="random")
assert_type(layer, nn.Linear)
assert_type(cwy.orthogonal(nn.Conv2d(3, 8, 3), "weight"), nn.Conv2d)
assert_type(cwy.orthogonal(nn.Linear(8, 8), init=torch.eye(8)), nn.Linear)
assert_type(cwy.compat.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"), nn.Linear)
with cwy.compat.patch_torch():
    pass

v = torch.randn(6, 4)
assert_type(cwy.ops.cwy_matrix(v), Tensor)
assert_type(cwy.ops.tcwy_matrix(v), Tensor)
assert_type(cwy.ops.cwy_multiply(cwy.ops.wy_factors(v), torch.randn(6)), Tensor)
vectors, signs = cwy.ops.householder_vectors(torch.eye(6))
assert_type(vectors, Tensor)
assert_type(signs, Tensor)
assert_type(cwy.init.haar(6, 4), Tensor)
assert_type(cwy.orthogonality_error(torch.eye(6)), float)

rnn = cwy.nn.OrthogonalRNN(3, 8, nonlinearity="tanh", batch_first=True)
model = cwy.bake(nn.Sequential(layer, nn.Tanh()))
assert_type(model, nn.Sequential)
optimizer = cwy.optim.for_model(
    rnn, lr=1e-3, orthogonal_lr=1e-2, optimizer=torch.optim.AdamW, weight_decay=0.1
)
assert_type(optimizer, torch.optim.Optimizer)
manifold = cwy.optim.StiefelAdam([nn.Parameter(torch.eye(4))], lr=0.1)
manifold.step()
optimizer.step()

method = cwy.METHODS["cwy"]
assert_type(method.domain, str)
assert_type(list(cwy.METHODS), list[str])
