"""Which submodules are layers."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from helpers import fit_microbatches, fit_pipeline
from models import UNet, bert, gpt2, llama, mixtral, t5, vit
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel

from lightning_roundpipe.pipeline.layers import LayerSpec, find_layers


def names(root: nn.Module, spec: LayerSpec | None = None) -> list[str]:
    """The names of the layers, after what must hold for any."""
    layers = find_layers(root, spec)
    modules = dict(root.named_modules())
    assert all(modules[name] is layer for name, layer in layers.items())
    inside = [submodule for layer in layers.values() for submodule in layer.modules()]
    assert root not in inside
    for layer in layers.values():
        assert not any(other in list(layer.modules())[1:] for other in layers.values())
    return list(layers)


class Holds(nn.Module):
    """A model that has these parts."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.feed = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.mix(x))


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, halve: bool = False) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) if halve else None

    def forward(self, x: Tensor) -> Tensor:
        return x


def resnet() -> nn.Module:
    stages = {f"stage{i}": nn.Sequential(Residual(True), Residual()) for i in range(1, 5)}
    return Holds(stem=nn.Conv2d(3, 4, 7), norm=nn.BatchNorm2d(4), relu=nn.ReLU(), **stages, head=nn.Linear(4, 2))


def mlp() -> nn.Module:
    return Holds(net=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Holds(embed=nn.Embedding(9, 4), encoder=nn.TransformerEncoder(layer, 3), head=nn.Linear(4, 9))


def lists() -> nn.Module:
    return Holds(blocks=nn.ModuleList(Block() for _ in range(2)), parts=nn.ModuleDict({"a": Block(), "b": Block()}))


def blocks() -> nn.Module:
    return Holds(blocks=nn.ModuleList(Block() for _ in range(2)), head=nn.Linear(4, 4))


def named_blocks() -> nn.Module:
    return Holds(first=Block(), second=Block(), third=Block(), head=nn.Linear(4, 4))


def student_and_teacher() -> nn.Module:
    """Two models side by side are looked into, though they are of one class."""
    return Holds(**{name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for name in ("student", "teacher")})


def with_position() -> nn.Module:
    model = Holds(body=nn.ModuleList(Block() for _ in range(2)))
    model.position = nn.Parameter(torch.zeros(4))
    return Holds(model=model, loss=nn.CrossEntropyLoss())


RESNET = ["stem", "norm", *(f"stage{i}.{j}" for i in range(1, 5) for j in range(2)), "head"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (mlp, ["net.0", "net.2"]),
        (encoder, ["embed", "encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "head"]),
        (resnet, RESNET),
        (lists, ["blocks.0", "blocks.1", "parts.a", "parts.b"]),
        (named_blocks, ["first", "second", "third", "head"]),
        (student_and_teacher, ["student.0", "student.1", "teacher.0", "teacher.1"]),
        (with_position, ["model.body.0", "model.body.1"]),
        (lambda: Holds(body=nn.Linear(4, 4)), ["body"]),
        (lambda: Holds(), []),
        (lambda: nn.Linear(4, 4), []),
    ],
)
def test_chosen_by_themselves(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert names(make()) == expected


def test_a_shared_module_is_one_layer() -> None:
    shared = Block()
    assert names(Holds(blocks=nn.ModuleList([shared, Block(), shared]))) == ["blocks.0", "blocks.1"]


def test_modules_without_tensors_are_no_layers() -> None:
    assert names(Holds(act=nn.ReLU(), drop=nn.Dropout(), body=nn.Linear(4, 4), loss=nn.MSELoss())) == ["body"]


def test_scripted_modules_are_no_layers() -> None:
    assert names(Holds(script=torch.jit.script(nn.Linear(4, 4)), body=nn.Linear(4, 4))) == ["body"]


def test_unet() -> None:
    model = UNet()
    found = names(model)
    assert len(found) >= 5
    assert {id(p) for name in found for p in model.get_submodule(name).parameters()} == {
        id(p) for p in model.parameters()
    }


@pytest.mark.parametrize("make", [gpt2, llama, bert, t5, mixtral, vit], ids=lambda make: make.__name__)
def test_models_of_transformers(make: Callable[[], nn.Module]) -> None:
    """Each repeated block is a layer, and (almost) no parameter is left to the code between the layers."""
    model = make()
    layers = find_layers(model)
    blocks = [
        block
        for submodule in model.modules()
        if isinstance(submodule, nn.ModuleList)
        for block in submodule
        if not any(block in list(other.modules())[1:] for other in layers.values())
    ]
    assert len(blocks) >= 2
    assert all(block in layers.values() for block in blocks)
    inside = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    assert sum(p.numel() for p in outside) <= 0.2 * sum(p.numel() for p in model.parameters())


# --- by the user's choice


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (["Block"], ["blocks.0", "blocks.1", "head"]),
        ([Block], ["blocks.0", "blocks.1", "head"]),
        (["Linear"], [f"blocks.{i}.{part}" for i in range(2) for part in ("mix", "feed.0", "feed.2")] + ["head"]),
        (["blocks.1"], ["blocks.0", "blocks.1", "head"]),
        (["blocks.0.feed"], ["blocks.0.mix", "blocks.0.feed", "blocks.1", "head"]),
        (["Block", "blocks.0.feed"], ["blocks.0", "blocks.1", "head"]),
        (lambda module: isinstance(module, nn.Sequential), ["blocks.0.feed", "blocks.1.feed"]),
        (lambda module: [module.blocks[0].mix], ["blocks.0.mix"]),
    ],
    ids=["class name", "class", "deeper class", "path", "deeper path", "both", "predicate", "function"],
)
def test_chosen_by_the_user(spec: LayerSpec, expected: list[str]) -> None:
    assert names(blocks(), spec) == expected


def test_every_parameter_of_the_rest_is_in_a_layer() -> None:
    model = resnet()
    found = names(model, ["Residual"])
    assert found == RESNET


class Namespace(nn.Module):
    """Holds modules, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (nn.ModuleList(Block() for _ in range(2)), ["rest.0", "rest.1"]),
        (nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2)),
         [f"rest.{i}.{j}" for i in range(2) for j in range(2)]),
        (nn.ModuleDict({"a": Block(), "b": nn.ReLU()}), ["rest.a"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(Block(), Block())),
         ["rest.0", "rest.2.0", "rest.2.1"]),
        (nn.ModuleDict({"a": nn.Sequential(Block(), nn.ReLU())}), ["rest.a.0"]),
        (Namespace(), ["rest.inner"]),
    ],
    ids=["list", "list of lists", "dict", "sequential", "sequential in a dict", "namespace"],
)  # fmt: skip
def test_containers_that_hold_none_of_the_chosen(rest: nn.Module, expected: list[str]) -> None:
    """Their children become layers, whether the container is called or its children are."""
    assert names(Holds(first=nn.Conv2d(4, 4, 1), rest=rest), ["Conv2d"]) == ["first", *expected]


def test_a_block_called_again_and_again() -> None:
    """ALBERT has one block, which it calls for each of its layers. Without several blocks side by side nothing shows
    that it is the block that counts, so the encoder is one layer, whose recompute holds the activations of all of its
    calls: right but coarse. By name it is a layer that is called as often as the encoder is deep.
    """
    config = AlbertConfig(
        vocab_size=9, embedding_size=4, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8
    )
    model = Holds(model=AlbertModel(config))
    assert names(model) == ["model.embeddings", "model.encoder", "model.pooler"]
    group = "model.encoder.albert_layer_groups.0.albert_layers.0"
    named = ["model.embeddings", "model.encoder.embedding_hidden_mapping_in", group, "model.pooler"]
    assert names(model, ["AlbertLayer"]) == named


def test_blocks_that_transformers_names() -> None:
    model = Holds(body=Holds(one=Block(), two=nn.Linear(4, 4)))
    model.body._no_split_modules = ["Block"]
    assert names(model) == ["body.one", "body.two"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["Missing"], r"names 'Missing', but Holds has no module of that path or class\. .* \['Block', "),
        (["blocks.7"], "names 'blocks.7', but Holds has no module"),
        ([nn.Conv2d], "names <class 'torch.nn.modules.conv.Conv2d'>, but Holds has no module"),
        (lambda module: [nn.Linear(4, 4)], r"modules that are not part of Holds: \['Linear'\]"),
    ],
)
def test_what_matches_nothing(spec: LayerSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_layers(lists(), spec)


class PenalizesItsHead(L.LightningModule):
    """Second derivatives through the head, which is no layer if it is kept out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        features = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.head(features).sum(), features, create_graph=True)
        return self.head(x).square().mean() + slope.square().sum(-1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "layers",
    [
        lambda module: list(module.blocks) if isinstance(module, PenalizesItsHead) else False,
        lambda module: len(list(module.children())) == 2 and isinstance(module, nn.Sequential),
    ],
    ids=["a list", "yes or no"],
)
def test_what_a_function_leaves_out_is_no_layer(layers: Any) -> None:
    """As the errors advise: then second derivatives work there, and the gradients are plain autograd's."""
    batches = [torch.randn(6, 4, dtype=torch.float64) for _ in range(3)]
    torch.manual_seed(0)
    ours, plain = (PenalizesItsHead().double() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    assert list(find_layers(ours, layers)) == ["blocks.0", "blocks.1", "blocks.2"]
    fit_pipeline(ours, batches, 3, devices=2, layers=layers)
    fit_microbatches(plain, batches, 3)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
