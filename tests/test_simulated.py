"""Simulated devices: whole models give the CPU's numbers, and every kind of mistake is caught."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import transformers
from helpers import weights
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.devices import (
    DeviceMixError,
    SimulatedDevice,
    SimulatedEvent,
    SimulatedTensor,
    StreamOrderError,
    simulating,
)
from lightning_roundpipe.devices.simulated import new_pinned_blocks, pinned

FLOAT = 4


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulating():
        yield SimulatedDevice(3)


@pytest.fixture
def here(device: SimulatedDevice) -> torch.device:
    return device.torch_device


@pytest.fixture
def elsewhere(device: SimulatedDevice) -> torch.device:
    return SimulatedDevice(1).torch_device


# --- whole models

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(72, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(x)), y)


def language(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def ids() -> Tensor:
    return torch.randint(0, 50, (2, 12))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))


def bert() -> nn.Module:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **off))


def moe() -> nn.Module:
    experts = {"num_local_experts": 4, "experts_implementation": "eager", "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_key_value_heads=2, **experts))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], Callable[..., Tensor], float]] = {
    "llama": (llama, lambda: dict(zip(("input_ids", "labels"), [ids()] * 2, strict=True)), language, 0.0),
    "bert": (
        bert,
        lambda: {"input_ids": ids(), "attention_mask": torch.ones(2, 12).long(), "labels": torch.tensor([0, 1])},
        language,
        0.0,
    ),
    "cnn": (
        Convolutional,
        lambda: {"x": torch.randn(4, 3, 8, 8), "y": torch.tensor([0, 1, 2, 3])},
        lambda model, batch: model(**batch),
        0.0,
    ),
    "moe": (moe, lambda: dict(zip(("input_ids", "labels"), [ids()] * 2, strict=True)), language, 0.0),
    # On the CPU, torch computes the inputs' part of all time steps at once: other roundings in the weights' gradients.
    "lstm": (
        Recurrent,
        lambda: {"x": torch.randn(4, 6, 5)},
        lambda model, batch: model(**batch).square().mean(),
        1e-12,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_give_the_cpus_numbers(name: str, dtype: torch.dtype, device: SimulatedDevice) -> None:
    make, make_batch, loss, tolerance = MODELS[name]
    model = make().to(dtype)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in make_batch().items()}
    reference = copy.deepcopy(model)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU has another kernel of its own
        expected = loss(reference, batch)
        expected.backward()
        model.to(device.torch_device)
        found = loss(model, {key: value.to(device.torch_device) for key, value in batch.items()})
        found.backward()
    assert isinstance(found, SimulatedTensor)
    if not tolerance:
        assert found.item() == expected.item()
    for part, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert part.device == device.torch_device
        if other.grad is None:
            assert part.grad is None
        elif tolerance:
            tolerance = tolerance if dtype == torch.float64 else 1e-4
            torch.testing.assert_close(part.grad.cpu(), other.grad, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(part.grad.cpu(), other.grad)
    moved = {name: value.cpu() for name, value in weights(model).items()}
    assert all(torch.equal(value, moved[name]) for name, value in weights(reference).items())


def test_training_with_an_optimizer(here: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(6, 4)
    results = []
    for place in (torch.device("cpu"), here):
        one = copy.deepcopy(model).to(place)
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(x.to(place)).square().mean().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
        results.append([parameter.detach().cpu() for parameter in one.parameters()])
    assert all(map(torch.equal, *results))


# --- a tensor of a device


def test_what_is_made_on_a_device_is_there(here: torch.device) -> None:
    x = torch.ones(2, 3, device=here)
    made = [
        torch.arange(3, device=x.device),
        torch.tensor([1, 2], device=x.device),
        torch.as_tensor([1.0], device=here),
        torch.full((2,), 3.0, device=here),
        torch.zeros_like(x),
        torch.zeros_like(torch.zeros(2), device=here),
        torch.randn_like(x),
        torch.randint(3, (2,), device=here),
        x.new_zeros(2),
        x.new_tensor([1, 2]),
        x + 1,
        x[0],
        x.double(),
    ]
    for tensor in made:
        assert isinstance(tensor, SimulatedTensor) and tensor.device == here and tensor.get_device() == 3
    assert made[1].tolist() == [1, 2] and made[4].sum().item() == 0 and made[9].tolist() == [1, 2]
    assert torch.tensor([1.0], device=here, requires_grad=True).requires_grad
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    assert torch.zeros(2, device="meta").device.index is None  # without an index it stays torch's own


@pytest.mark.parametrize(
    "index",
    [
        [1, 0], [True, False], (slice(None), [2, 0]), (0, range(2)), (1, (0, 2)), [[0, 1], [2, 0]],
        (slice(None), [[0, 1], [2, 0]]), [], (slice(None), []), [slice(None), 1], numpy.array([1, 0]), (None, 1, ...),
        [torch.tensor([1]), torch.tensor([2])],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_indices_of_every_kind(index: Any, here: torch.device) -> None:
    """Torch makes tensors of lists, for 'meta' without values."""
    x = torch.arange(24.0).reshape(2, 3, 4)
    there, written = x.to(here), x.clone()
    assert torch.equal(there[index].cpu(), x[index])
    there[index] = written[index] = -1.0
    assert torch.equal(there.cpu(), written)


def test_a_tensor_without_values_is_refused(here: torch.device) -> None:
    x = torch.ones(2, device=here)
    with pytest.raises(DeviceMixError):
        x[torch.tensor([0], device="meta")]
    assert x.new([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_values_leave_as_from_any_device(here: torch.device) -> None:
    x = torch.tensor([[1.5, 2.5]], device=here, requires_grad=True)
    assert x.tolist() == [[1.5, 2.5]] and x[0, 0].item() == 1.5 and float(x.detach()[0, 1]) == 2.5
    assert f"{x.detach()[0, 0]:.2f}" == "1.50" and "device='meta:3'" in repr(x)
    assert x.cpu().device.type == "cpu" and torch.equal(x.cpu(), torch.tensor([[1.5, 2.5]]))
    with pytest.raises(TypeError, match=r"can't convert meta:3 .* numpy"):
        x.detach().numpy()
    with pytest.raises(TypeError, match="can't convert"):
        x.detach().__array__()
    assert x.detach().cpu().numpy().shape == (1, 2) and x.numpy(force=True).shape == (1, 2)
    assert bool((x > 1).all()) and torch.equal(x, x.clone())


def test_copies_of_objects(here: torch.device) -> None:
    module = nn.Linear(2, 2).to(here)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(other.weight, nn.Parameter) and other.weight.device == here
        assert other.weight.requires_grad and torch.equal(other.weight, module.weight)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["bias"], module.bias)


def test_gradients_go_with_copies(here: torch.device, elsewhere: torch.device) -> None:
    x = torch.randn(3, requires_grad=True)
    (x.to(here).mul(2).to(elsewhere).mul(3).cpu() * torch.arange(3.0)).sum().backward()
    assert x.grad.device.type == "cpu" and torch.equal(x.grad, 6 * torch.arange(3.0))
    y = torch.ones(3, device=here, requires_grad=True)
    (y.cpu() * 2).sum().backward()
    assert y.grad.device == here and y.grad.tolist() == [2, 2, 2]


def test_gradient_edges(here: torch.device) -> None:
    x = torch.randn(3, device=here, requires_grad=True)
    y = x * 2
    edge = torch.autograd.graph.get_gradient_edge(y)
    (of_edge,) = torch.autograd.grad((y * y).sum(), edge, retain_graph=True)
    assert torch.equal(of_edge, 2 * y)
    torch.autograd.backward((edge,), (torch.ones_like(y),))
    assert x.grad.tolist() == [2, 2, 2]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


def test_functions_hooks_views_and_changes_in_place(here: torch.device) -> None:
    results = []
    for place in (torch.device("cpu"), here):
        x = (torch.arange(12.0).reshape(3, 4) - 5).to(place).requires_grad_()
        seen: list[Tensor] = []
        x.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
        h = Doubled.apply(x)
        h[0].add_(1)
        rows = h.view(12)[:4]
        rows.mul_(3)
        h.T.index_put_((torch.tensor([0]),), h.new_zeros(3))
        h[h > 30] = 0
        h.relu_()
        h.sum().backward()
        results.append([h.detach().cpu(), x.grad.cpu(), seen[0].cpu()])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z = x * 1
            y = z.square()
            z.add_(1)
            y.sum().backward()
    assert all(map(torch.equal, *results))


def test_changes_of_shape_and_memory(here: torch.device) -> None:
    x = torch.arange(6.0, device=here).reshape(2, 3)
    x.t_().unsqueeze_(0)
    assert x.shape == (1, 3, 2) and x.stride() == torch.arange(6.0).reshape(2, 3).t_().unsqueeze_(0).stride()
    y = torch.zeros(2, device=here)
    assert y.resize_(5).shape == (5,) and y.block.nbytes == 5 * FLOAT
    parameter = nn.Parameter(torch.zeros(2, device=here))
    parameter.data = torch.ones(3, device=here)
    assert parameter.tolist() == [1, 1, 1] and (parameter * 2).shape == (3,)
    parameter.data.mul_(2)
    assert parameter.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.ones(3)
    assert parameter.data_ptr() == parameter.detach().view(3, 1).data_ptr() != y.data_ptr()


@pytest.mark.parametrize("where", ["device", "host"])
def test_changes_are_counted(where: str, here: torch.device) -> None:
    """As without a dispatch mode: autograd, and whoever looks for changes, depends on it."""
    x, y = (torch.ones(2, device=here if where == "device" else "cpu") for _ in range(2))
    for number, change in enumerate(
        (lambda: x.mul_(2), lambda: torch._foreach_lerp_([x], [y], 0.5), lambda: torch._foreach_zero_([x]))
    ):
        change()
        assert x._version == number + 1
    assert torch._foreach_add([x], [y])[0].tolist() == [1.0, 1.0] and x._version == 3


def test_sparse_gradients(here: torch.device) -> None:
    results = []
    for place in (torch.device("cpu"), here):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True).to(place)
        table(torch.tensor([1, 2, 1], device=place)).sum().backward()
        assert table.weight.grad.layout == torch.sparse_coo and table.weight.grad.device == place
        torch.optim.SGD(table.parameters(), 0.1).step()
        results.append([table.weight.grad.cpu().to_dense(), table.weight.detach().cpu()])
    assert all(map(torch.equal, *results))


def test_random_numbers_are_the_devices_own(device: SimulatedDevice, here: torch.device) -> None:
    before = torch.get_rng_state()
    draws: list[Callable[[torch.device], Tensor]] = [
        lambda place: torch.rand(3, device=place),
        lambda place: torch.randn(2, 2, device=place),
        lambda place: torch.randperm(5, device=place),
        lambda place: torch.randint(2, 9, (4,), device=place),
        lambda place: torch.rand_like(torch.zeros(3, device=place)),
        lambda place: torch.empty(3, device=place).normal_(1, 2),
        lambda place: torch.ones(5, device=place).multinomial(3),
        lambda place: functional.dropout(torch.ones(9, device=place)),
        lambda place: nn.LSTM(2, 3, 2, dropout=0.5).to(place)(torch.ones(2, 4, 2, device=place))[0] * 0,
    ]
    for draw in draws[:-1]:
        torch.manual_seed(5)
        expected = draw(torch.device("cpu"))
        device.generator.manual_seed(5)
        torch.set_rng_state(before)
        assert torch.equal(draw(here).cpu(), expected)
        assert torch.equal(torch.get_rng_state(), before), "the host's generator is not touched"
    draws[-1](here)
    with pytest.raises(RuntimeError, match="Expected a generator of meta:3"):
        torch.empty(3, device=here).normal_(generator=torch.Generator())
    assert torch.rand(3, device=here, generator=device.generator).shape == (3,)
    with pytest.raises(NotImplementedError, match="native_dropout"):
        torch.native_dropout(torch.ones(3, device=here), 0.5, True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_the_same_again(reentrant: bool, device: SimulatedDevice, here: torch.device) -> None:
    x = torch.ones(200, device=here, requires_grad=True)
    y = checkpoint(lambda x: functional.dropout(x, 0.5) * torch.rand(200).to(here), x, use_reentrant=reentrant)
    device.generator.manual_seed(5)
    torch.manual_seed(5)
    before, on_host = device.generator.get_state(), torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert torch.equal(device.generator.get_state(), before) and torch.equal(torch.get_rng_state(), on_host)


def test_forked_random_numbers(device: SimulatedDevice, here: torch.device) -> None:
    before = device.generator.get_state(), torch.get_rng_state()
    with torch.random.fork_rng():
        torch.rand(2, device=here)
        torch.rand(2)
    assert torch.equal(device.generator.get_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])


# --- autocast


def cast_inside(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = x @ w
    return y + torch.relu(y @ w)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x @ w,
    "products": lambda x, w: (x @ w) @ w,
    "by name": lambda x, w: functional.linear(input=x, weight=w, bias=w[0]),
    "in place": lambda x, w: (x @ w).mul_(2.0),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "batches": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "convolution": lambda x, w: functional.conv1d(x[None], w[:, :, None]),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x[None, None], w[None, None], x[None, None]),
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "norm": lambda x, w: functional.layer_norm(x @ w, (8,), w[0], w[1]),
    "in full precision": lambda x, w: functional.mse_loss(x @ w, x, reduction="none"),
    "distances": lambda x, w: torch.cdist(x @ w, w),
    "widest": lambda x, w: torch.cat([x @ w, x]),
    "half": lambda x, w: torch.stack([x @ w, w @ x]),
    "with a number": lambda x, w: torch.addcmul(x @ w, x, x, value=2.0),
    "cast by hand": lambda x, w: (x.double() @ w.double()).float() @ w,
    "switched off": cast_inside,
    "whole numbers": lambda x, w: (x.detach() * 4).long().float() @ w,
    "view": lambda x, w: x.view(2, 4, 8).transpose(0, 1) @ w.t(),
}


def graph_of(tensor: Tensor) -> list[str]:
    names, stack = [], [tensor.grad_fn]
    while stack:
        if (node := stack.pop()) is not None:
            names.append(node.name())
            stack += [following for following, _ in node.next_functions]
    return names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_is_the_cpus(name: str, dtype: torch.dtype, here: torch.device) -> None:
    """The same types and numbers, and the same graph, of which casts are a part."""
    with sdpa_kernel(SDPBackend.MATH):
        found = []
        for device in (torch.device("cpu"), here):
            generator = torch.Generator().manual_seed(0)
            x, w = (torch.randn(8, 8, generator=generator).to(device).requires_grad_() for _ in range(2))
            with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
                out = OPERATIONS[name](x, w)
            out.sum().backward()
            found.append((out, [tensor.grad for tensor in (x, w) if tensor.grad is not None], graph_of(out)))
    (expected, gradients, graph), (ours, our_gradients, our_graph) = found
    assert isinstance(ours, SimulatedTensor) and ours.dtype == expected.dtype
    assert torch.equal(ours.cpu(), expected) and our_graph == graph
    assert len(gradients) == len(our_gradients) > 0
    for gradient, ours in zip(gradients, our_gradients, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours.cpu(), gradient)


def test_autocast_of_a_whole_model(here: torch.device) -> None:
    torch.manual_seed(0)
    model, batch = Convolutional(), MODELS["cnn"][1]()
    copied = copy.deepcopy(model).to(here)
    with torch.autocast("cpu", torch.bfloat16):
        loss, ours = model(**batch), copied(**{name: value.to(here) for name, value in batch.items()})
    loss.backward()
    ours.backward()
    assert torch.equal(ours.cpu(), loss)
    for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(twin.grad.cpu(), parameter.grad)


def test_autocast_ends(here: torch.device) -> None:
    x = torch.randn(3, 3, device=here)
    with torch.autocast(here.type, torch.bfloat16):
        assert torch.is_autocast_enabled(here.type) and torch.get_autocast_dtype(here.type) == torch.bfloat16
        assert (x @ x).dtype == torch.bfloat16 and (x.double() @ x.double()).dtype == torch.float64
    assert (x @ x).dtype == torch.float32 and not torch.is_autocast_enabled(here.type)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DeviceMixError):
        x @ torch.ones(3, 3)


# --- devices are not mixed


MIXES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, other: x + other,
    "add in place": lambda x, other: x.add_(other),
    "to the other in place": lambda x, other: other.add_(x),
    "matmul": lambda x, other: x @ other,
    "linear": lambda x, other: functional.linear(x, other),
    "cat": lambda x, other: torch.cat([x, other]),
    "stack": lambda x, other: torch.stack([x[0, 0], other[0, 0]]),
    "where": lambda x, other: torch.where(x > 0, x, other),
    "cross entropy": lambda x, other: functional.cross_entropy(x, other[0].long()),
    "out": lambda x, other: torch.add(x, 1, out=other),
    "equal": lambda x, other: torch.equal(x, other),
    "index": lambda x, other: other[x[0].long()],
}


@pytest.mark.parametrize("other", ["host", "device"])
@pytest.mark.parametrize("name", MIXES)
def test_mixing_raises(name: str, other: str, here: torch.device, elsewhere: torch.device) -> None:
    x = torch.ones(2, 2, device=here)
    y = torch.ones(2, 2) if other == "host" else torch.ones(2, 2, device=elsewhere)
    with pytest.raises(DeviceMixError, match="meta:3") as caught:
        MIXES[name](x, y)
    assert "same device" in str(caught.value)
    assert ("the host (cpu)" if other == "host" else "meta:1") in str(caught.value)


def test_what_may_mix(here: torch.device, elsewhere: torch.device) -> None:
    x = torch.ones(2, 2, device=here)
    number = torch.tensor(2.0)
    assert (x * number).device == (number + x).device == torch.where(x > 0, x, number).device == here
    assert x.masked_fill(x > 0, number).tolist() == [[2, 2], [2, 2]]
    assert x[torch.tensor([0])].device == here  # indices
    assert x.copy_(torch.zeros(2, 2)).sum().item() == 0
    assert torch.ones(2, 2).copy_(x).sum().item() == 0
    x[0] = torch.ones(2)  # is a copy
    assert torch.ones(2, 2, device=elsewhere).copy_(x).tolist() == [[1, 1], [0, 0]]
    with pytest.raises(DeviceMixError):  # only the host's numbers
        x + torch.tensor(2.0, device=elsewhere)
    with pytest.raises(DeviceMixError):
        torch.ones(2, 2) + torch.tensor(2.0, device=here)
    with pytest.raises(DeviceMixError):
        number.add_(x.sum())


def test_mixing_raises_in_the_backward(here: torch.device) -> None:
    class Astray(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.cpu()

    x = torch.ones(2, device=here, requires_grad=True)
    with pytest.raises(DeviceMixError, match="meta:3"):
        (Astray.apply(x * x) * x).sum().backward()


def test_a_replaced_device(here: torch.device) -> None:
    x = torch.ones(2, device=here)
    SimulatedDevice(3)
    with pytest.raises(DeviceMixError, match="replaced"):
        x + 1


def test_simulation_belongs_to_a_thread(here: torch.device) -> None:
    made: list[Tensor] = []

    def work() -> None:
        made.append(torch.ones(2, device=here))  # torch's own: no values
        with simulating():
            made.append(torch.ones(2, device=here))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not isinstance(made[0], SimulatedTensor) and made[1].tolist() == [1, 1]
    with pytest.raises(DeviceMixError):
        made[0] + made[1]


# --- memory


def test_memory_is_counted_by_storage(device: SimulatedDevice, here: torch.device) -> None:
    x = torch.zeros(10, device=here)
    view = x[2:4]
    also = x.detach().view(2, 5)
    assert device.memory.live == 10 * FLOAT
    del x, also
    assert device.memory.live == 10 * FLOAT, "the view holds it"
    y = view + 1
    assert device.memory.live == device.memory.peak == 12 * FLOAT
    del view
    assert device.memory.live == 2 * FLOAT
    device.memory.reset_peak()
    z = y.clone()
    del z
    assert device.memory.live == 2 * FLOAT and device.memory.peak == 4 * FLOAT


def test_new_blocks_are_those_for_which_nothing_freed_serves(device: SimulatedDevice, here: torch.device) -> None:
    def new(make: Callable[[], Any]) -> int:
        before = device.memory.blocks.new
        make()
        return device.memory.blocks.new - before

    def two() -> None:
        held = [torch.zeros(5, device=here) for _ in range(2)]
        assert len(held) == 2

    side = device.stream()

    def aside() -> None:
        with side:
            torch.zeros(5, device=here)

    def recorded() -> None:
        x = torch.zeros(5, device=here)
        side.wait_stream(device.default_stream)
        with side:
            x.sum()
        x.record_stream(side)

    assert new(lambda: torch.zeros(5, device=here)) == 1
    assert new(lambda: torch.zeros(5, device=here)) == 0
    assert new(lambda: torch.zeros(6, device=here)) == 1, "another size"
    assert new(two) == 1 and new(two) == 0
    assert new(aside) == 1 and new(aside) == 0, "another stream"
    assert new(lambda: torch.zeros(3, device=here).resize_(6)) == 1, "what is resized, has another place"
    assert new(lambda: torch.zeros(3, device=here)) == 0 and new(lambda: torch.zeros(0, device=here)) == 0
    assert new(recorded) == 1, "the sum's"
    assert new(two) == 1, "one is held until the other stream has done with it"
    device.default_stream.wait_stream(side)
    assert new(two) == 0 and device.memory.live == 0


def test_new_pinned_blocks(here: torch.device) -> None:
    gc.collect()

    def new(count: int) -> int:
        before = new_pinned_blocks()
        held = [pinned(torch.zeros(12345)) for _ in range(count)]
        assert len(held) == count
        return new_pinned_blocks() - before

    assert [new(count) for count in (2, 1, 2, 3, 3)] == [2, 0, 0, 1, 0]


def test_autograd_holds_what_it_saves(device: SimulatedDevice, here: torch.device) -> None:
    x = torch.ones(10, device=here, requires_grad=True)
    y = x.exp().sin().sum()
    assert device.memory.live == 21 * FLOAT  # x, exp(x) and the sum; sin(x) is free
    y.backward()
    assert device.memory.live == 21 * FLOAT  # exp(x) is free, and there is a gradient
    del x, y
    assert device.memory.live == 0


def test_cycles_hold_until_collected(device: SimulatedDevice, here: torch.device) -> None:
    holder: dict[str, Any] = {"x": torch.zeros(10, device=here)}
    holder["self"] = holder
    dead = weakref.ref(holder["x"])
    del holder
    gc.collect()
    assert dead() is None and device.memory.live == 0


def test_capacity() -> None:
    device = SimulatedDevice(3, capacity=100 * FLOAT)
    with simulating():
        x = torch.zeros(60, device=device.torch_device)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 240 bytes.*capacity of 400"):
            x + 1
        assert device.memory.live == 60 * FLOAT
        x.add_(1)
        y = torch.zeros(10).to(device.torch_device)
        with pytest.raises(torch.OutOfMemoryError):
            y.resize_(50)
        del x
        assert torch.zeros(60, device=device.torch_device).shape == (60,)


def test_copies_are_counted(here: torch.device, elsewhere: torch.device) -> None:
    device = SimulatedDevice(3, bandwidth=1000.0, latency=0.5)
    other = SimulatedDevice(1)
    x = torch.zeros(10).to(here)
    x.half().to(elsewhere).cpu()
    x.cpu()
    x[:5].to(torch.float64, copy=True)  # stays
    x.copy_(torch.zeros(()))
    assert (device.up.count, device.up.nbytes) == (2, 20 * FLOAT)
    assert (device.down.count, device.down.nbytes) == (1, 10 * FLOAT)
    assert (other.across.count, other.across.nbytes, other.down.nbytes) == (1, 20, 20)
    assert device.up.seconds == pytest.approx(2 * (0.5 + 0.04))
    assert other.down.seconds == 0


# --- streams


@pytest.fixture
def side(device: SimulatedDevice) -> Any:
    return device.stream("the upload stream")


def test_use_on_another_stream_needs_an_event(device: SimulatedDevice, here: torch.device, side: Any) -> None:
    with side:
        x = torch.ones(2, device=here)
        event = side.record_event()
        y = x + 1
    with pytest.raises(StreamOrderError, match=r"the default stream of meta:3.*the upload stream of meta:3"):
        x + 1
    device.default_stream.wait_event(event)
    assert (x + 1).tolist() == [2, 2]
    with pytest.raises(StreamOrderError):  # made after the event
        y + 1
    device.default_stream.wait_stream(side)
    assert (y + 1).tolist() == [3, 3]


def test_an_event_that_was_never_recorded_makes_nobody_wait(
    device: SimulatedDevice, here: torch.device, side: Any
) -> None:
    with side:
        x = torch.ones(2, device=here)
    SimulatedEvent().wait(device.default_stream)
    with pytest.raises(StreamOrderError):
        x + 1


def test_views_touch_nothing_and_waits_are_handed_on(device: SimulatedDevice, here: torch.device, side: Any) -> None:
    third = device.stream("a third stream")
    with side:
        x = torch.ones(2, device=here)
    view = x.view(2, 1)
    third.wait_stream(side)
    device.default_stream.wait_stream(third)  # and so for the upload stream
    assert (view + 1).shape == (2, 1)


def test_overwriting_what_another_stream_reads(device: SimulatedDevice, here: torch.device, side: Any) -> None:
    x = torch.ones(2, device=here)
    side.wait_stream(device.default_stream)
    with side:
        kept = x + 1
    with pytest.raises(StreamOrderError, match=r"overwrites, on the default stream .* the upload stream"):
        x.zero_()
    device.default_stream.wait_stream(side)
    x.zero_()
    assert kept.shape == (2,)


def test_the_host_waits_for_what_it_reads(device: SimulatedDevice, here: torch.device) -> None:
    x = torch.ones(2, device=here)
    blocking = x.to("cpu")
    assert (blocking + 1).tolist() == [2, 2]
    pending = x.to("cpu", non_blocking=True)
    with pytest.raises(StreamOrderError, match="reads, on the host"):
        pending + 1
    with pytest.raises(StreamOrderError):
        pending[0].item()
    event = device.default_stream.record_event()
    assert not event.query()
    event.synchronize()
    assert event.query() and (pending + 1).tolist() == [2, 2]
    buffer = torch.empty(2)
    buffer.copy_(x, non_blocking=True)
    with pytest.raises(StreamOrderError, match="may not have written"):
        buffer.zero_()
    device.synchronize()
    buffer.zero_()


def test_a_host_buffer_that_an_upload_still_reads(device: SimulatedDevice, here: torch.device) -> None:
    buffer = torch.ones(4).pin_memory()
    assert buffer.is_pinned() and not torch.ones(4).is_pinned()
    x = buffer[:2].to(here, non_blocking=True)
    assert buffer.sum() == 4  # reading is no matter
    with pytest.raises(StreamOrderError, match="overwrites, on the host"):
        buffer.zero_()
    with pytest.raises(StreamOrderError):
        buffer[2:].fill_(3)
    device.default_stream.record_event().synchronize()
    buffer.zero_()
    assert x.tolist() == [1, 1]
    buffer.to(here)
    buffer.zero_()  # the host has waited


def test_an_upload_of_what_a_download_still_writes(device: SimulatedDevice, here: torch.device, side: Any) -> None:
    x = torch.ones(2, device=here)
    buffer = torch.empty(2)
    buffer.copy_(x, non_blocking=True)
    with side, pytest.raises(StreamOrderError):
        buffer.to(here, non_blocking=True)
    side.wait_stream(device.default_stream)
    with side:
        buffer.to(here, non_blocking=True)
    buffer.to(here, non_blocking=True)


def test_memory_that_is_used_again_too_early(device: SimulatedDevice, here: torch.device, side: Any) -> None:
    def use(then: Callable[[Tensor], None]) -> None:
        x = torch.ones(2, device=here)
        side.wait_stream(device.default_stream)
        with side:
            x.sum()
        then(x)

    use(lambda x: None)
    with pytest.raises(StreamOrderError, match="was freed while the upload stream"):
        torch.ones(2, device=here)
    use(lambda x: device.default_stream.wait_stream(side))
    torch.ones(2, device=here)
    held = device.memory.live
    use(lambda x: x.record_stream(side))
    torch.ones(2, device=here)
    assert device.memory.live == held + 2 * FLOAT, "held until the stream has done with it"
    side.synchronize()
    assert device.memory.live == held


def test_copies_between_devices_wait_for_both(here: torch.device, elsewhere: torch.device) -> None:
    x = torch.ones(2, device=here)
    y = x.to(elsewhere, non_blocking=True)
    assert (y + 1).tolist() == [2, 2]
    x.zero_()


def test_time_of_copies_in_streams() -> None:
    device = SimulatedDevice(3, bandwidth=FLOAT * 10.0)
    up, beside, down = (device.stream(name) for name in ("up", "up, too", "down"))
    with simulating():
        x = torch.zeros(50, device=device.torch_device)
        down.wait_stream(device.default_stream)
        for stream, copy in ((up, torch.zeros(100)), (beside, torch.zeros(30)), (down, x)):
            with stream:
                copy.to("cpu" if copy is x else device.torch_device, non_blocking=True)
    times = up.seconds, beside.seconds, down.seconds, device.default_stream.seconds
    assert times == (10.0, 13.0, 5.0, 0.0), "those on one link one after the other"
    down.wait_stream(up)
    assert down.seconds == 10.0
