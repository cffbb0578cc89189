"""Layers and their replicas: the layer's code and attributes, run on other tensors."""

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_roundpipe.pipeline.replica import Layer, NormStatistics, Replica, commit_norm_statistics


def layer_of(module: nn.Module) -> Layer:
    return Layer(0, "layer", module)


def loaded(layer: Layer, scale: float = 1.0, *, merge: bool = False, copies: dict | None = None) -> Replica:
    """A replica on scaled parameters."""
    replica = layer.borrow()
    state = layer.attributes()
    replica.load(
        state,
        [state.dicts[i][key] for i, key in state.inputs],
        [(parameter.detach() * scale).requires_grad_() for parameter in layer.parameters],
        layer.buffers(),
        merge_norm_statistics=merge,
        copies=copies or {},
    )
    return replica


def attributes_of(module: nn.Module) -> list[dict[str, Any]]:
    return [dict(submodule.__dict__) for submodule in module.modules()]


class References(nn.Module):
    """Refers to its own modules and parameters in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.weights = [self.inner.weight]
        self.table = {"inner": (self.inner,)}
        self.weak = weakref.ref(self.inner)
        self.method = self.inner.forward

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            self.inner(x),
            F.linear(x, self.weights[0], self.inner.bias),
            self.table["inner"][0](x),
            self.weak()(x),
            self.method(x),
        ]


MODULES = {
    "mlp": lambda: (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)),
    "lstm": lambda: (nn.LSTM(4, 4, batch_first=True), torch.randn(3, 5, 4)),
    "attention": lambda: (nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), torch.randn(3, 5, 4)),
    "parametrized": lambda: (parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(3, 4)),
    "embedding": lambda: (nn.Embedding(9, 4), torch.arange(3)),
    "norm": lambda: (nn.BatchNorm1d(4).eval(), torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_replica_computes_what_the_layer_computes(name: str) -> None:
    module, x = MODULES[name]()
    replica, expected = loaded(layer_of(module)), module(x)
    assert torch.equal(*(out[0] if isinstance(out, tuple) else out for out in (replica.forward(x), expected)))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "norm"])
def test_it_computes_with_what_it_was_given(name: str) -> None:
    module, x = MODULES[name]()
    replica = loaded(layer_of(module), 2.0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    expected = module(x)
    assert torch.equal(*(out[0] if isinstance(out, tuple) else out for out in (replica.forward(x), expected)))


@pytest.mark.parametrize("name", MODULES)
def test_the_layer_stays_as_it_is(name: str) -> None:
    module, x = MODULES[name]()
    layer, before = layer_of(module), attributes_of(module)
    replica = loaded(layer, 2.0)
    out = replica.forward(x)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    layer.give_back(replica)
    for now, then in zip(attributes_of(module), before, strict=True):
        assert now.keys() == then.keys()
        assert all(now[key] is then[key] for key in now)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_references_to_itself_lead_to_the_replica() -> None:
    module, x = References(), torch.randn(3, 2)
    replica = loaded(layer_of(module), 2.0)
    expected = F.linear(x, module.inner.weight * 2, module.inner.bias * 2)
    for output in replica.forward(x):
        assert torch.equal(output, expected)
    assert replica.attribute_changes() == []


def test_copies_of_references_to_itself_lead_to_the_replica() -> None:
    module, x = References(), torch.randn(3, 2)
    layer = layer_of(module)
    replica = loaded(layer, 2.0, copies=layer.attributes().container_copies())
    expected = F.linear(x, module.inner.weight * 2, module.inner.bias * 2)
    for output in replica.forward(x):
        assert torch.equal(output, expected)


@pytest.mark.parametrize("name", MODULES)
def test_it_serves_again_with_other_tensors(name: str) -> None:
    module, x = MODULES[name]()
    layer = layer_of(module)
    for scale in (1.0, 1.0, 2.0, 3.0):
        replica = loaded(layer, scale)
        again = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.mul_(scale)
        outputs = (out[0] if isinstance(out, tuple) else out for out in (replica.forward(x), again(x)))
        assert torch.equal(*outputs)
        layer.give_back(replica)


def test_it_serves_again_after_the_attributes_have_changed() -> None:
    module, x = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval(), torch.randn(3, 2)
    layer = layer_of(module)
    for p in (0.5, 0.0, 1.0):
        module[1].p = p
        module.train(p != 0.5)
        replica = loaded(layer)
        torch.manual_seed(0)
        output = replica.forward(x)
        torch.manual_seed(0)
        assert torch.equal(output, module(x))
        layer.give_back(replica)


def test_what_a_call_has_set_is_gone_in_the_next() -> None:
    class Remembers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not hasattr(self, "last")
            self.last = x
            return x

    layer = layer_of(Remembers())
    for _ in range(3):
        replica = loaded(layer)
        replica.forward(torch.ones(1))
        assert [name for _, name, _ in replica.attribute_changes()] == ["last"]
        layer.give_back(replica)


def test_tied_parameters_are_one() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    layer = layer_of(module)
    assert len(layer.parameters) == 3
    shells = loaded(layer).shells
    assert shells[1].weight is shells[2].weight


def test_replicas_are_of_the_layer_s_class_and_tree() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    shells = loaded(layer_of(module)).shells
    assert [type(shell) for shell in shells] == [type(submodule) for submodule in module.modules()]
    assert list(shells[0].modules()) == shells
    assert not set(shells) & set(module.modules())


# --- what a call leaves behind


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls, self.same, self.last = 0, "same", None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.inner.last = self.last = x
        self.same = self.__dict__["same"]
        self.mine = [self.inner, self.inner.weight]
        return self.inner(x)


def test_attributes_that_a_call_sets() -> None:
    module, x = Sets(), torch.randn(1, 2)
    replica = loaded(layer_of(module))
    replica.forward(x)
    changes = {(i, key): value for i, key, value in replica.attribute_changes()}
    assert changes.keys() == {(0, "calls"), (0, "last"), (0, "mine"), (1, "last")}
    assert changes[0, "calls"] == 1
    assert changes[0, "last"] is changes[1, "last"] is x
    assert changes[0, "mine"][0] is module.inner
    assert changes[0, "mine"][1] is module.inner.weight
    assert module.calls == 0
    assert module.last is None


class Remembers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[Tensor] = []
        self.total = torch.zeros(2)
        self.state = torch.ones(2, requires_grad=True) * 2

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.total += 1
        return super().forward(x) * self.state


def test_kinds_of_attributes() -> None:
    module = Remembers()
    state = layer_of(module).attributes()
    assert state.inputs == [(0, "state")]
    assert state.tensors == [(0, "total")]
    assert (0, "seen") in state.containers
    copies = state.copies()
    assert copies[0, "seen"] == []
    assert copies[0, "seen"] is not module.seen
    assert copies[0, "total"].data_ptr() != module.total.data_ptr()
    sizes = state.sizes()
    module.seen.append(torch.zeros(1))
    assert state.sizes() != sizes


def test_a_run_on_copies_leaves_the_layer_s_own() -> None:
    module = Remembers()
    layer = layer_of(module)
    loaded(layer, copies=layer.attributes().copies()).forward(torch.zeros(1, 2))
    assert module.seen == []
    assert torch.equal(module.total, torch.zeros(2))


def test_attributes_are_taken_anew_when_they_change() -> None:
    module = Sets()
    layer = layer_of(module)
    state = layer.attributes()
    assert layer.attributes() is state
    module.inner.label = "label"
    assert layer.attributes() is not state


def test_hooks_inside_are_put_off() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    seen: list[Any] = []
    module.register_forward_hook(lambda *_: seen.append("layer's own"))
    module[0].register_forward_hook(lambda *_: seen.append("inner"))
    x = torch.randn(1, 2)
    replica = loaded(layer_of(module))
    replica.forward(x)
    assert seen == []
    (call,) = replica.hook_calls
    assert call.module == 1
    assert call.args[0] is x
    assert torch.equal(call.output, module[0].forward(x))


def test_released_replicas_hold_nothing_and_serve_again() -> None:
    layer = layer_of(nn.Linear(2, 2))
    replica = loaded(layer)
    weight = weakref.ref(replica.shells[0].weight)
    layer.give_back(replica)
    assert weight() is None
    assert not replica.shells[0].__dict__["_parameters"]
    assert layer.borrow() is replica
    assert layer.borrow() is not replica


# --- the layer


def test_whether_the_layer_is_what_it_was() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer = layer_of(module)
    assert layer.is_current()
    module[0].weight.data = torch.zeros(2, 2)
    assert layer.is_current()
    kept, module[0].weight = module[0].weight, nn.Parameter(torch.zeros(2, 2))
    assert not layer.is_current()
    assert not layer.has_own_parameters()
    module[0].weight = kept
    assert layer.is_current()
    module.append(nn.Linear(2, 2))
    assert not layer.is_current()


def test_dropout_draws_in_training_only() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    layer = layer_of(module)
    assert layer.draws()
    assert not layer_of(module.eval()).draws()
    module.train()[1].p = 0.0
    assert not layer.draws()
    layer.traits.draws = True
    assert layer.draws()


# --- BatchNorm


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("sizes", [(4, 4), (6, 2), (3, 4, 5)])
def test_statistics_of_microbatches_are_merged_to_the_batch_s(sizes: tuple[int, ...], momentum: float | None) -> None:
    torch.set_default_dtype(torch.float64)
    whole, module = (nn.BatchNorm1d(3, momentum=momentum) for _ in range(2))
    layer = layer_of(module)
    for _ in range(3):
        x = torch.randn(sum(sizes), 3) * 3 + 1
        whole(x)
        statistics: list[list[NormStatistics]] = []
        for part in x.split(sizes):
            replica = loaded(layer, merge=True)
            assert torch.allclose(replica.forward(part), F.batch_norm(part, None, None, training=True))
            statistics.append(replica.norm_statistics)
            layer.give_back(replica)
        assert module.num_batches_tracked == whole.num_batches_tracked - 1
        commit_norm_statistics(statistics)
        for name, buffer in whole.named_buffers():
            assert torch.allclose(module.get_buffer(name), buffer)


def test_a_norm_that_is_called_twice_is_updated_twice() -> None:
    torch.set_default_dtype(torch.float64)
    whole, module = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    layer, batches = layer_of(module), [torch.randn(4, 3), torch.randn(4, 3) + 5]
    for x in batches:
        whole(x)
    statistics: list[list[NormStatistics]] = [[], []]
    for x in batches:
        for microbatch, part in enumerate(x.split(2)):
            replica = loaded(layer, merge=True)
            replica.forward(part)
            statistics[microbatch] += replica.norm_statistics
    commit_norm_statistics(statistics)
    assert module.num_batches_tracked == 2
    assert torch.allclose(module.running_mean, whole.running_mean)
    assert torch.allclose(module.running_var, whole.running_var)
