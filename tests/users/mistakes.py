"""A user's mistakes: mypy and pyright report each line that is marked, and no other."""

import torch
from torch import nn

import cwy

cwy.orthogonal("a layer")  # mistake
cwy.orthogonal(nn.Linear(4, 4), method=4)  # mistake
cwy.orthogonal(nn.Linear(4, 4), reflections="4")  # mistake
cwy.orthogonl(nn.Linear(4, 4))  # mistake
cwy.ops.cwy_matrix([[1.0]])  # mistake
cwy.init.haar("6")  # mistake
cwy.optim.for_model(torch.eye(4))  # mistake
cwy.compat.orthogonal(nn.Linear(4, 4), use_trivialisation=True)  # mistake
