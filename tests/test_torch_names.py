"""Torch's private names: each is there, and means what ``cwy._torch`` says."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import cwy
from cwy import _torch


class Doubled(nn.Module):
    def forward(self, *parts):
        return sum(parts) * 2

    def right_inverse(self, weight):
        return weight / 4, weight / 4


class Half(nn.Module):
    def forward(self, x):
        return x / 2

    def right_inverse(self, weight):
        return 2 * weight


class Ops(TorchDispatchMode):
    """Records the ops that are called."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.called.append(op)
        return op(*args, **(kwargs or {}))


def test_all_names_are_there():
    gpu_only = {"gpu_index", "gpu_stream"}
    missing = {name for name in _torch.__all__ if getattr(_torch, name) is None}
    assert missing <= gpu_only
    assert not missing or torch.version.cuda is None


def test_forward_mode_is_noticed():
    assert not _torch.forward_mode_is_active()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.forward_mode_is_active()
    assert not _torch.forward_mode_is_active()


def test_no_other_file_uses_a_private_name_of_torch():
    private = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+|from torch(\.\w+)* import .*\b_[a-zA-Z]\w*")
    root = Path(cwy.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        if path == root / "_torch.py":
            continue
        found += [
            f"{path.relative_to(root)}:{number}: {line.strip()}"
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if private.search(line)
        ]
    assert not found


def test_whether_a_transform_is_active():
    seen = []

    def note(x):
        seen.append(_torch.transform_is_active())
        return x.sum()

    note(torch.ones(2))
    torch.func.grad(note)(torch.ones(2))
    torch.func.vmap(note)(torch.ones(2, 2))
    assert seen == [False, True, True]


def test_the_count_of_dispatch_modes():
    assert _torch.dispatch_mode_count() == 0
    with FlopCounterMode(display=False):
        assert _torch.dispatch_mode_count() == 1
        with Ops():
            assert _torch.dispatch_mode_count() == 2


def test_whether_a_tensor_has_storage():
    seen = []

    def note(x):
        seen.append(_torch.has_storage(x))
        return x

    note(torch.ones(2))
    torch.func.vmap(note)(torch.ones(2, 2))
    assert seen == [True, False]


def test_ops_below_autograd_are_not_recorded():
    x = torch.ones(2, requires_grad=True)
    with _torch.below_autograd():
        assert not (2 * x).requires_grad
    assert (2 * x).requires_grad


def test_each_backward_pass_has_a_number():
    numbers = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x.sum()
        y.register_hook(lambda grad: numbers.append(_torch.backward_number()))
        y.backward()
    assert _torch.backward_number() == -1
    assert len(set(numbers)) == 2
    assert min(numbers) >= 0


def test_an_unsafe_view_may_be_written_to():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return _torch.unsafe_view(2 * x.flatten(), x.shape)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(2, 3, requires_grad=True)
    y = Doubled.apply(x)
    assert not y._is_view()
    y.mul_(3).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), 6.0))


def test_whether_saved_tensors_are_packed():
    assert not _torch.saved_tensors_are_packed()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert _torch.saved_tensors_are_packed()


@pytest.mark.gpu
def test_the_current_gpu_and_its_stream():
    assert _torch.gpu_index() == torch.cuda.current_device()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert _torch.gpu_stream(stream.device_index) == stream.cuda_stream


def test_ops_on_lists_of_tensors():
    tensors = [torch.tensor([1.0, 4.0]), torch.tensor([2.0])]
    (norm, _) = _torch.foreach_norm(tensors, 2, torch.float64)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(17**0.5)
    assert [t.tolist() for t in _torch.foreach_div(tensors, [t * 2 for t in tensors])] == [
        [0.5, 0.5],
        [0.5],
    ]
    _torch.foreach_clamp_min_(tensors, 2.0)
    _torch.foreach_clamp_max_(tensors, 3.0)
    _torch.foreach_mul_(tensors, [torch.tensor(2.0), torch.tensor(3.0)])
    assert [t.tolist() for t in tensors] == [[4.0, 6.0], [6.0]]


@pytest.mark.parametrize(
    ("op", "call"),
    [
        (_torch.solve_op, lambda x: torch.linalg.solve(x, x)),
        (_torch.eigh_op, torch.linalg.eigh),
        (_torch.fourier_op, lambda x: torch.fft.fft(x.to(torch.complex64))),
    ],
)
def test_ops_that_modes_see(op, call):
    with Ops() as ops:
        call(torch.eye(3))
    assert op in [called.overloadpacket for called in ops.called]


def test_scan_carries_a_state():
    total, partial = _torch.scan(
        lambda carry, x: (carry + x, (carry + x).clone()), torch.zeros(2), torch.ones(3, 2)
    )
    assert total.tolist() == [3.0, 3.0]
    assert partial[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert isinstance(_torch.scan_op, torch._ops.HigherOrderOperator)


def test_fake_tensors_have_shapes_and_no_values():
    with _torch.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, 3))
        assert (fake @ fake.mT).shape == (2, 2)
    assert type(fake) is not Tensor


def test_a_tree_is_mapped():
    tree = {"loss": torch.ones(()), "rest": [1, (torch.zeros(2),)]}
    mapped = _torch.tree_map_only(Tensor, lambda t: t + 1, tree)
    assert mapped["loss"] == 2
    assert mapped["rest"][0] == 1
    assert mapped["rest"][1][0].tolist() == [1.0, 1.0]


def test_convolutions_have_one_base():
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
    assert all(issubclass(kind, _torch.ConvNd) for kind in kinds)
    assert not issubclass(nn.Linear, _torch.ConvNd)


def test_the_originals_of_a_parametrized_weight():
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", Half())
    chain = layer.parametrizations["weight"]
    assert [t.tolist() for t in _torch.originals(chain)] == [(2 * before).tolist()]

    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", Doubled())
    found = _torch.originals(layer.parametrizations["weight"])
    assert [t.tolist() for t in found] == [(before / 4).tolist()] * 2
    assert all(isinstance(t, nn.Parameter) for t in found)


def test_the_class_of_a_parametrized_module():
    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Half())
    assert type(layer) is not nn.Linear
    assert _torch.unparametrized_class(layer) is nn.Linear


def test_what_a_module_has_of_its_own():
    model = nn.Sequential(nn.Linear(2, 2))
    assert _torch.own_child(model, "0") is model[0]
    assert _torch.own_child(model, "forward") is None
    assert _torch.own_parameter(model[0], "bias") is model[0].bias
    assert _torch.own_parameter(model[0], "in_features") is None


def test_hooks_before_a_state_is_loaded():
    layer = nn.Linear(2, 2)
    called = []
    layer.register_load_state_dict_pre_hook(lambda *_: called.append(1))
    hooks = _torch.load_state_dict_pre_hooks(layer)
    layer.load_state_dict(layer.state_dict())
    hooks.clear()
    layer.load_state_dict(layer.state_dict())
    assert called == [1]


def test_lazy_conjugation_inside_an_op_of_a_compiled_program():
    library = torch.library.Library("cwy_test", "FRAGMENT")
    library.define("squares(Tensor x) -> Tensor")

    def squares(x):
        with _torch.with_lazy_conjugation():
            return x * x.conj()

    library.impl("squares", squares, "CompositeExplicitAutograd")
    torch.library.register_fake("cwy_test::squares", torch.empty_like, lib=library)
    x = torch.randn(3, dtype=torch.complex128)
    compiled = torch.compile(torch.ops.cwy_test.squares, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x * x.conj())


def test_more_programs_of_one_function_may_be_compiled():
    with torch._dynamo.config.patch(recompile_limit=1):
        _torch.allow_compilations(3)
        torch._dynamo.reset()
        form = torch.compile(lambda x, n: x * n, backend="eager", fullgraph=True, dynamic=False)
        x = torch.ones(2)
        assert [form(x, n).sum().item() for n in (2, 3, 4)] == [4, 6, 8]


def test_a_plain_call_of_a_function_is_differentiated():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    x = torch.ones(3, requires_grad=True)
    _torch.plain_apply(Twice)(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_hooks_are_noticed():
    layer = nn.Linear(2, 2)
    assert not _torch.has_hooks(layer)
    hook = layer.register_forward_hook(lambda *given: None)
    assert _torch.has_hooks(layer)
    hook.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert _torch.has_hooks(layer)
    everywhere.remove()
    assert not _torch.has_hooks(layer)


def test_cached_parametrizations_are_noticed():
    assert not _torch.parametrizations_are_cached()
    with parametrize.cached():
        assert _torch.parametrizations_are_cached()
