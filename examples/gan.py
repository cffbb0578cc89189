"""Trains a generative adversarial network on points around a ring, with two optimizers that are stepped by hand.

    python examples/gan.py --steps 1500

With `automatic_optimization = False` a training step runs as in plain Lightning, on the host: it is neither split into
microbatches nor run on the pipeline's devices. So the strategy gives it nothing, and does no harm. Prints, among
Lightning's own lines:

    generated points: 0 of 8 clusters reached, 0.00 of the points within one before training
    generated points: 8 of 8 clusters reached, 0.89 of the points within one after 1500 steps
"""

import argparse
import math

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_roundpipe  # noqa: F401  (registers the strategy's name)

CLUSTERS, SPREAD, NOISE = 8, 0.1, 8
ANGLES = torch.arange(CLUSTERS) * (2 * math.pi / CLUSTERS)
CENTRES = torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)


def network(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    activation = nn.LeakyReLU(0.2)
    return nn.Sequential(
        nn.Linear(inputs, width), activation, nn.Linear(width, width), activation, nn.Linear(width, outputs)
    )


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = network(NOISE, 2), network(2, 1)

    def forward(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, NOISE))

    def training_step(self, batch: tuple[Tensor]) -> None:
        (real,) = batch
        of_generator, of_discriminator = self.optimizers()
        fake = self(len(real))
        judged = self.discriminator(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
        loss = nn.functional.binary_cross_entropy_with_logits(judged, truth)
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()

        fooled = nn.functional.softplus(-self.discriminator(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(fooled)
        of_generator.step()
        self.log_dict({"discriminator": loss, "generator": fooled}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(net.parameters(), 1e-3, betas=(0.5, 0.999)) for net in networks]

    @torch.no_grad()
    def describe(self, when: str) -> str:
        distances = torch.cdist(self(2000), CENTRES)
        within = distances.min(dim=1).values < 3 * SPREAD
        reached = len(distances.argmin(dim=1)[within].unique())
        return (
            f"generated points: {reached} of {CLUSTERS} clusters reached, "
            f"{within.float().mean():.2f} of the points within one {when}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    points = CENTRES.repeat(640, 1) + SPREAD * torch.randn(640 * CLUSTERS, 2)
    module = GAN()
    print(module.describe("before training"))
    trainer = L.Trainer(strategy="roundpipe", accelerator="cpu", max_steps=2 * options.steps, logger=False)
    trainer.fit(module, DataLoader(TensorDataset(points), batch_size=256, shuffle=True))
    print(module.describe(f"after {trainer.global_step // 2} steps"))


if __name__ == "__main__":
    main()
