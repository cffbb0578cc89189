"""What an entry of the zoo is, and how models of transformers become one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models import SGD, HuggingFace, Lit
from torch import Tensor, nn

VOCABULARY = 40

Data = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """A small model with random weights, and what it is trained on.

    Attributes:
        name: As in the table.
        make: Makes the model, the same one for the same seed.
        data: A batch of so many samples.
        notes: What is special about it, beside what the table finds out by itself.
        layers: An option of the strategy; of use where a model has no blocks side by side.
    """

    name: str
    make: Callable[[], Lit]
    data: Data
    notes: str = ""
    layers: Sequence[str] | None = None


def network(architecture: str, /, *, attention: str | None = None, **config: Any) -> nn.Module:
    """A randomly initialized model of transformers, named by its class."""
    import transformers

    kind = getattr(transformers, architecture)
    made = kind.config_class(**config)
    if attention is not None:
        made._attn_implementation = attention
    return kind(made)


def pretrained(architecture: str, /, **config: Any) -> Callable[[], Lit]:
    """A LightningModule around a model of transformers that returns its own loss. Its optimizer is SGD with momentum:
    a scale that is wrong shows, which Adam would hide.
    """
    return lambda: HuggingFace(network(architecture, **config), optimizer=SGD)


def with_adam(make: Callable[[], Lit]) -> Callable[[], Lit]:
    def made() -> Lit:
        model = make()
        model.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
        return model

    return made
