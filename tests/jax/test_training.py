"""Training in JAX is training in torch: the same losses from the same start and data."""

import jax
import numpy as np
import pytest
import torch

from cwy import ops
from tests.jax import copying

STEPS, N, BATCH, BLANKS = 50, 48, 8, 200


def torch_losses(values, signs, dtype):
    """The losses of the same training in torch."""
    values = {n: torch.tensor(x, dtype=dtype, requires_grad=True) for n, x in values.items()}
    signs = torch.from_numpy(signs).to(dtype)
    free = [x for name, x in values.items() if name != "v"]
    groups = [
        {"params": free, "lr": copying.RATE},
        {"params": [values["v"]], "lr": copying.ORTHOGONAL_RATE},
    ]
    optimizer = torch.optim.Adam(groups)
    units = torch.eye(copying.SYMBOLS + 2, dtype=dtype)
    found = []
    for i in range(STEPS):
        x, y = (torch.from_numpy(part).long() for part in copying.batch(i, BATCH, BLANKS))
        q = ops.cwy_matrix(values["v"], signs=signs)
        h0 = torch.zeros(BATCH, N, dtype=dtype)
        states, _ = ops.rollout(units[x], h0, q, values["bias"], weight=values["weight"])
        logits = states @ values["readout"].T + values["offset"]
        cost = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        found.append(cost.item())
    return np.array(found)


def jax_losses(values, signs):
    return np.array(list(copying.train(values, signs, STEPS, BATCH, BLANKS)))


@pytest.mark.slow
def test_fifty_steps_of_copying_are_those_of_torch():
    """In float64 to many digits. In float32 JAX is as near to that as torch."""
    values, signs = copying.initial(N)
    truth = torch_losses(values, signs, torch.float64)
    theirs = torch_losses(values, signs, torch.float32)
    ours = jax_losses(values, signs)
    with jax.enable_x64(True):
        wide = {name: x.astype("float64") for name, x in values.items()}
        exact = jax_losses(wide, signs.astype("float64"))
    assert truth[-1] < truth[0] / 5
    np.testing.assert_allclose(exact, truth, rtol=1e-8)
    noise = np.abs(theirs / truth - 1).max()
    assert noise < 0.01
    assert np.abs(ours / truth - 1).max() <= 3 * noise
