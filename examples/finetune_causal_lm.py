"""Fine-tunes a causal language model of transformers, in full or with LoRA, on text that ships with Python.

    python examples/finetune_causal_lm.py                  # a tiny Llama with random weights, one byte a token
    python examples/finetune_causal_lm.py --lora           # the same, adapters only
    python examples/finetune_causal_lm.py Qwen/Qwen3-0.6B --lora --precision bf16-mixed --save adapters

Takes whatever `from_pretrained` takes: a name on the hub, or a folder. Prints, among Lightning's own lines:

    LlamaForCausalLM: 197,184 parameters, 197,184 of them trained; 466,273 tokens of text
    validation loss: 5.532 before, 2.434 after 100 steps
"""

import argparse
from pydoc_data.topics import topics

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import lightning_roundpipe  # noqa: F401  (registers the strategy's name)

TEXT = "\n\n".join(topics.values())
CONTEXT = 128


def model_and_tokens(name: str | None) -> tuple[nn.Module, Tensor]:
    """The model, and the text as its tokens: without a tokenizer its bytes."""
    tokens = torch.tensor(list(TEXT.encode()))
    if name is None:
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
        )
        return AutoModelForCausalLM.from_config(config), tokens
    model = AutoModelForCausalLM.from_pretrained(name)
    try:
        tokens = torch.tensor(AutoTokenizer.from_pretrained(name)(TEXT)["input_ids"])
    except (OSError, ValueError):
        print(f"{name} has no tokenizer: its tokens are bytes")
    return model, tokens


class FineTuning(L.LightningModule):
    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model, self.learning_rate = model, learning_rate

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor) -> None:
        self.log("val_loss", self.model(input_ids=tokens, labels=tokens).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), self.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a name or folder for from_pretrained")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--save", help="a folder for save_pretrained")
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    model, tokens = model_and_tokens(options.model)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    name = type(model.get_base_model() if options.lora else model).__name__
    print(f"{name}: {total:,} parameters, {trained:,} of them trained; {len(tokens):,} tokens of text")

    windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    train, val = windows.split([len(windows) - 100, 100])
    val_data, module = DataLoader(val, options.batch_size), FineTuning(model, options.learning_rate)
    trainer = L.Trainer(
        strategy="roundpipe", accelerator="cpu", devices=options.devices, precision=options.precision,
        max_steps=options.steps, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    (before,) = trainer.validate(module, val_data, verbose=False)
    trainer.fit(module, DataLoader(train, options.batch_size, shuffle=True))
    (after,) = trainer.validate(module, val_data, verbose=False)
    print(f"validation loss: {before['val_loss']:.3f} before, {after['val_loss']:.3f} after {options.steps} steps")
    if options.save:
        model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
