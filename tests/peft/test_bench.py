"""The benchmark ``adapters``: every kind of adapter runs, and ours are orthogonal."""

import torch

from cwy.bench.suites import adapters
from cwy.peft._versions import SAVES_BIASES


def test_every_adapter_is_right_and_ours_are_orthogonal():
    size = (32, 4, 2, 16)
    errors = {}
    for entry in adapters.entries(size):
        if entry.name == "BOFT" and not SAVES_BIASES:
            continue  # that of PEFT 0.18 mixes float32 into float64
        assert entry.why_not(torch.float64, torch.device("cpu")) is None
        torch.manual_seed(0)
        case = entry.make(torch.float64, torch.device("cpu"))
        out = case.call(*case.inputs)
        assert out.shape == (16, 32)
        torch.testing.assert_close(out, case.truth(*case.inputs).detach())
        if case.orthogonality is not None:
            errors[entry.name] = case.orthogonality(out)
    ours = {name for name in errors if name.startswith("cwy")}
    assert len(ours) == 3
    assert all(errors[name] < 1e-12 for name in ours)
    # A truncated series, which OFT has by default, is not orthogonal.
    assert errors["OFT"] > 1e-6
