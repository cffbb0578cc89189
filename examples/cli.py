"""The digits of classify_digits.py from a config file, with LightningCLI.

    python examples/cli.py fit --config examples/config.yaml
    python examples/cli.py fit --config examples/config.yaml --trainer.strategy.microbatches 6 --model.depth 8

Needs `pip install "jsonargparse[signatures]"`. Prints, among Lightning's own lines:

    4 microbatches, staleness 1; accuracy on the validation set: 0.9810
"""

from classify_digits import Classifier, Digits
from lightning.pytorch.cli import LightningCLI

import lightning_roundpipe  # noqa: F401  (registers the strategy's name)

if __name__ == "__main__":
    trainer = LightningCLI(Classifier, Digits, seed_everything_default=0).trainer
    accuracy = trainer.callback_metrics["val_accuracy"]
    strategy = trainer.strategy
    print(
        f"{strategy.microbatches} microbatches, staleness {strategy.staleness};"
        f" accuracy on the validation set: {accuracy:.4f}"
    )
