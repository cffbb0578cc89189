"""One GPU: tokens per second, share of its peak, memory, and the longest sequence, against other ways to train there.

    python benchmarks/gpu.py [--layers 24] [--width 2048] [--tokens 1024] [--samples 16]

A GPT in bf16-mixed with AdamW, by ours, by plain Lightning with everything on the GPU and checkpointed blocks, and with
CPU offload by FSDP2 and, if it is installed, by DeepSpeed. Each contestant runs in a process of its own and for so long
at most that all together take less than ten minutes; the host needs 16 bytes of memory for each parameter of the larger
model. Without a GPU it says so and ends.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import GPT, Batches, Row, quiet, show, some_tokens, train
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import RoundPipeStrategy

VOCABULARY = 32_000
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "RTX 3090": 71e12}
"""Dense bf16 operations per second with sums in fp32, by what is part of the GPU's name."""
LARGER = {"layers": 32, "width": 3584}
"""With Adam's state it fits into 128 GiB of host memory, and on few GPUs."""
STEPS = 5
SECONDS = {"speed": 195, "larger": 220, "longest": 150}
"""How long all contestants together may take."""


class DeviceGPT(GPT):
    """The same, with the positions where the tokens are."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return self.head(x)


def flops_per_token(layers: int, width: int, tokens: int, vocabulary: int = VOCABULARY) -> float:
    """Of forward and backward, without recomputation: two for each weight of a linear map in the forward and four in
    the backward, and the same for queries with keys, and attention with values, of half of the tokens on average.
    """
    weights = layers * 12 * width**2 + width * vocabulary
    return 6 * weights + 6 * layers * width * tokens


def peak_flops(name: str) -> float | None:
    """The GPU's peak, if it is known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def by_pipeline(model: GPT, batches: Any, options: argparse.Namespace) -> None:
    strategy = RoundPipeStrategy(microbatches=min(4, options.samples), split="step")
    train(model, batches, strategy, accelerator=options.accelerator, precision="bf16-mixed")


def on_the_gpu(model: GPT, batches: Any, options: argparse.Namespace) -> None:
    model.checkpoint = True
    train(model, batches, "auto", accelerator=options.accelerator, precision="bf16-mixed")


def by_fsdp2(model: GPT, batches: Any, options: argparse.Namespace) -> None:
    """By a loop: in a single process, with parameters, gradients and the optimizer on the CPU."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.checkpoint = True
    for part in (*model.blocks, model):
        fully_shard(part, offload_policy=CPUOffloadPolicy(), mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for batch in batches:
        optimizer.zero_grad()
        model.training_step(batch.cuda()).backward()
        optimizer.step()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def by_deepspeed(model: GPT, batches: Any, options: argparse.Namespace) -> None:
    """By Lightning's strategy, with the optimizer that DeepSpeed has for offloading."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from lightning.pytorch.strategies import DeepSpeedStrategy

    model.checkpoint = True
    model.configure_optimizers = lambda: DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
    strategy = DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)
    train(model, batches, strategy, accelerator=options.accelerator, precision="bf16-mixed")


Contestant = Callable[[GPT, Any, argparse.Namespace], None]
CONTESTANTS: dict[str, Contestant] = {
    "ours": by_pipeline,
    "all on the GPU": on_the_gpu,
    "FSDP2 with CPU offload": by_fsdp2,
}
if importlib.util.find_spec("deepspeed"):
    CONTESTANTS["DeepSpeed ZeRO-3 with CPU offload"] = by_deepspeed


def make(options: argparse.Namespace, tokens: int) -> GPT:
    torch.manual_seed(0)
    return DeviceGPT(options.layers, options.width, tokens, VOCABULARY)


def speed(contestant: Contestant, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of all steps but the first ones, and the most bytes that the GPU held."""
    source = Batches(some_tokens(options.samples, options.tokens, VOCABULARY), STEPS)
    contestant(make(options, options.tokens), source, options)
    end = time.perf_counter()  # when the last step is done, which may be after the last batch was fetched
    seconds = (end - source.times[0]) / STEPS
    memory = torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0
    return {"tokens_per_second": options.samples * options.tokens / seconds, "memory": memory}


def longest(contestant: Contestant, options: argparse.Namespace) -> Iterator[int]:
    """Ever longer sequences of which a sample could be trained, until one could not."""
    tokens = 1024
    while True:
        batches = Batches(some_tokens(1, tokens, VOCABULARY), 0)
        try:
            contestant(make(options, tokens), batches, argparse.Namespace(**{**vars(options), "samples": 1}))
        except torch.OutOfMemoryError:
            return
        yield tokens
        tokens *= 2


def in_a_process(name: str, what: str, options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """What the contestant has printed until it ended, failed, or its time was over."""
    shape = [f"--{key}={getattr(options, key)}" for key in ("layers", "width", "tokens", "samples", "accelerator")]
    command = [sys.executable, __file__, "--child", name, what, *shape]
    seconds = SECONDS[what] / (len(CONTESTANTS) - (what == "larger"))
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=seconds).stdout
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode()
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")] or None


def rows_of(
    name: str, found: dict[str, list[dict[str, Any]] | None], options: argparse.Namespace, gpu: str
) -> list[Row]:
    """The table's lines of one contestant; what it could not do is said to be 0."""
    rows: list[Row] = []
    for what in ("speed", "larger"):
        if what not in found:
            continue
        shape = vars(options) | (LARGER if what == "larger" else {})
        result = (found[what] or [{"tokens_per_second": 0.0, "memory": 0}])[-1]
        label = f"{name}, {shape['layers']} layers of width {shape['width']}"
        flops = result["tokens_per_second"] * flops_per_token(shape["layers"], shape["width"], shape["tokens"])
        peak = peak_flops(gpu)
        share = "its peak is not known" if peak is None else f"{flops / peak:.1%} of the peak"
        rows.append(Row(f"{label}: speed", result["tokens_per_second"] / 1e3, "k tokens/s", peer=share))
        rows.append(Row(f"{label}: memory", result["memory"] / 2**30, "GiB"))
    tokens = (found.get("longest") or [{"tokens": 0}])[-1]["tokens"]
    rows.append(Row(f"{name}: longest sequence of a sample", tokens, "tokens"))
    return rows


def measure(options: argparse.Namespace) -> list[Row]:
    gpu = torch.cuda.get_device_name()
    larger = argparse.Namespace(**{**vars(options), **LARGER})
    rows: list[Row] = []
    for name in CONTESTANTS:
        found = {"speed": in_a_process(name, "speed", options), "longest": in_a_process(name, "longest", options)}
        if name != "all on the GPU":
            found["larger"] = in_a_process(name, "larger", larger)
        rows += rows_of(name, found, options, gpu)
    return rows


def child(name: str, what: str, options: argparse.Namespace) -> None:
    quiet()
    if what == "longest":
        for tokens in longest(CONTESTANTS[name], options):
            print(json.dumps({"tokens": tokens}), flush=True)
    else:
        print(json.dumps(speed(CONTESTANTS[name], options)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--accelerator", default="gpu", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child, options)
    elif not torch.cuda.is_available():
        print("There is no GPU on this machine, so there is nothing to measure.")
    else:
        show(f"One GPU: {torch.cuda.get_device_name()}", measure(options), "gpu.json")


if __name__ == "__main__":
    main()
