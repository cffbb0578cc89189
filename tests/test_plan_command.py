"""The commands, and what they know about a model without its weights."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_roundpipe.cli import main
from lightning_roundpipe.compare import bound_memory, compare
from lightning_roundpipe.machine import GPUS, PRECISIONS, Machine
from lightning_roundpipe.schedules import gpipe
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.draw import draw
from lightning_roundpipe.schedules.memory import Memory
from lightning_roundpipe.schedules.partition import bound
from lightning_roundpipe.schedules.simulate import simulate
from lightning_roundpipe.tracing import build, load, trace

ROOT = Path(__file__).parent.parent
HERE = __name__
SMALL = f"--model {HERE}:small --batch {HERE}:ids "


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def small() -> nn.Module:
    return Small()


def with_frozen_blocks() -> nn.Module:
    model = Small()
    model.blocks.requires_grad_(False)
    return model


class Valued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else x


def looks_at_values() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Valued(), nn.Linear(8, 8))


def no_model() -> list[nn.Module]:
    return [small()]


def ids(samples: int) -> tuple[torch.Tensor]:
    return (torch.randint(10, (samples, 6)),)


def vectors(samples: int) -> torch.Tensor:
    return torch.randn(samples, 8)


# --- tracing


def test_operations_and_bytes_of_layers() -> None:
    calls = trace(*build(small, ids, samples=5))
    assert [call.layer for call in calls] == ["embed", *(f"blocks.{i}" for i in range(4)), "head"]
    rows = 5 * 6
    for call in calls[1:5]:
        assert call.parameters == call.trainable == 2 * 8 * 32
        assert call.forward_flops == 2 * rows * 8 * 32 * 2
        assert call.backward_flops == 2 * call.forward_flops
        assert call.input_bytes == rows * 8 * 4
        # The input, both sides of the ReLU being one tensor for autograd, and the output.
        assert call.activation_bytes == rows * (8 + 32 + 8) * 4
    assert calls[0].forward_flops == 0
    head = calls[-1]
    assert head.forward_flops == 2 * rows * 8 * 10
    # The input, the logits, and what the loss keeps: log-probabilities, labels, and the sum of their weights.
    assert head.activation_bytes == pytest.approx(rows * (8 + 10 + 10) * 4 + rows * 8, abs=16)


def test_frozen_layers_have_half_the_backward() -> None:
    calls = trace(*build(with_frozen_blocks, ids, samples=2))
    for call in calls[1:5]:
        assert call.trainable == 0
        assert call.backward_flops == call.forward_flops  # only to reach the embedding below


def test_a_lightning_module_runs_its_training_step() -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Small()

        def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

    assert trace(*build(Module, ids, 2))[0].layer == "net.embed"


def test_a_model_that_looks_at_values() -> None:
    with pytest.raises(RuntimeError, match=r"layer '1' cannot run without values"):
        trace(*build(looks_at_values, vectors, 2))


def test_nothing_is_allocated() -> None:
    """A hundred billion parameters."""

    def large() -> nn.Module:
        return nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(10)))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls = trace(*build(large, lambda samples: torch.randn(samples, 100_000), 1000))
    assert sum(call.parameters for call in calls) == 10**11
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_load() -> None:
    assert load(f"{HERE}:small") is load(f"{HERE}:small")
    for path, message in (("nothing", "package.module:name"), ("no_such:x", "cannot be imported"), (f"{HERE}:x", "x")):
        with pytest.raises(ValueError, match=message):
            load(path)


# --- costs on a machine


def test_costs_on_a_machine() -> None:
    calls = trace(*build(small, ids, samples=5))
    machine = Machine(8, GPUS["RTX 4090"], efficiency=0.5)
    costs = machine.costs(calls, PRECISIONS["bf16-mixed"])
    block = calls[1]
    assert costs.forward[1] == pytest.approx(block.forward_flops / (0.5 * 165e12))
    assert costs.upload[1] == pytest.approx(2 * 512 / 25e9)
    assert costs.download[1] == pytest.approx(4 * 512 / 25e9)
    assert costs.optimizer[1] == pytest.approx(512 / 2e9)
    assert costs.weight_gradient[1] == pytest.approx(costs.forward[1])
    assert costs.host_links == 6
    memory = machine.memory(calls, PRECISIONS["bf16-mixed"], microbatches=3)
    assert memory.limit == pytest.approx(21.6e9)
    assert memory.gradients[1] == 4 * 512 and memory.fresh[1] == 2 * 512
    assert memory.besides == (2 + 1 + 3) * max(call.input_bytes for call in calls)
    assert machine.memory(calls, PRECISIONS["bf16-mixed"], microbatches=1).fresh == (0,) * 6


# --- the commands


def _words(text: str) -> list[str]:
    return text.split()


def test_simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(_words("simulate --layers 8 --devices 4 --microbatches 8")) == 0
    out = capsys.readouterr().out
    assert "Step time in the unit of --forward and" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert rows.keys() >= {
        "roundpipe", "roundpipe_async", "model_parallel", "sequential",
        "gpipe", "1f1b", "interleaved", "zb1p", "dualpipe",
    }  # fmt: skip
    assert "27.3" in rows["gpipe"] and "27.3" in rows["1f1b"] and "15.8" in rows["interleaved"]


def test_simulate_says_what_a_schedule_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_words("simulate --layers 6 --devices 4 --microbatches 5 --schedules dualpipe interleaved gpipe")) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "dualpipe: DualPipe needs an even number of devices" in out
    assert "interleaved: 6 layer calls cannot be cut into 8 stages" in out


@pytest.mark.parametrize("lanes", ["1", "2", "auto"])
def test_plan(lanes: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    arguments = f"plan --model {HERE}:small --batch {HERE}:ids --devices 2 --microbatches 4 --lanes {lanes}"
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "roundpipe: fits" in out and "roundpipe_async: fits" in out
    assert "gpipe: about 0.0 of 21.6 GB, fits" in out
    assert "blocks.0 .. 3" in out


def test_plan_says_why_something_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"plan --model {HERE}:small --batch {HERE}:ids --memory 0.000001 --tflops 1 --link 1 --host-memory 0"
    assert main([*arguments.split(), "--devices", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "roundpipe: does not fit: layer blocks.0 alone needs 0.0 GB of a device, which has 0.0; it needs" in out
    assert "of host memory, and there are 0" in out
    assert "roundpipe_async 5+6" in out, "what it would take all the same"


def test_tables_are_eighty_columns_wide(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(_words("simulate --layers 32 --devices 8 --microbatches 16 --lanes 8")) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    row = next(line for line in out.splitlines() if "roundpipe_async" in line)
    assert len(row.split()) == 10  # name, lanes, and eight numbers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"--model {HERE}:small --batch {HERE}:ids --gpu Nothing", "The GPU 'Nothing' is not known"),
        (f"--model {HERE}:absent --batch {HERE}:ids", "cannot be imported"),
        (f"--model {HERE}:looks_at_values --batch {HERE}:vectors", "cannot run without values"),
        (f"--model {HERE}:no_model --batch {HERE}:ids", "makes no torch.nn.Module, but list"),
        (SMALL + "--samples 0", "at least 1 sample, not 0"),
        (SMALL + "--memory 0", "`memory` must be finite and more than 0, got 0.0"),
        (SMALL + "--tflops nan", "`tflops` must be finite and more than 0, got nan"),
        (SMALL + "--link -2", "`link` must be finite and more than 0, got -2.0"),
        (SMALL + "--efficiency 0", "`efficiency` must be finite and more than 0, got 0.0"),
        (SMALL + "--efficiency 1.5", "`efficiency` is a share, at most 1, got 1.5"),
        (SMALL + "--host-memory -1", "`host_memory` must be at least 0, got -1.0"),
        (SMALL + "--host-bandwidth 0", "`host_bandwidth` must be finite and more than 0"),
        (SMALL + "--optimizer-rate inf", "`optimizer_rate` must be finite and more than 0"),
        (
            f"--model {HERE}:small --batch {HERE}:small",
            "small, which makes the batch, is called with the number of samples: too many positional arguments",
        ),
        (
            f"--model {HERE}:ids --batch {HERE}:ids",
            "ids, which makes the model, is called without arguments: missing a required argument: 'samples'",
        ),
        (
            f"--model {HERE}:small --batch {HERE}:HERE",
            "with the number of samples: give a function or class, not a str",
        ),
        (f"--model {HERE}:HERE --batch {HERE}:ids", "is called without arguments: give a function or class, not a str"),
    ],
)
def test_plan_errors(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layers 0", "No layer takes any time"),
        ("--forward 0 --backward 0", "No layer takes any time"),
        ("--devices 0", "at least 1 device and 1 microbatch, not 0 devices"),
        ("--devices -1", "at least 1 device and 1 microbatch, not -1 devices"),
        ("--microbatches 0", "at least 1 device and 1 microbatch, not 8 devices and 0 microbatches"),
        ("--lanes 0", "8 devices cannot be divided into 0 lanes"),
        ("--lanes 3", "8 devices cannot be divided into 3 lanes"),
        ("--forward -1", "`forward` must be finite and at least 0, got -1.0"),
        ("--backward inf", "`backward` must be finite and at least 0, got inf"),
        ("--upload nan", "`upload` must be finite and at least 0, got nan"),
        ("--hop -1", "`hop` must be finite and at least 0, got -1.0"),
        ("--weight-gradient 3", "of a backward that takes 2.0 cannot take 3.0"),
        ("--host-links 0", "`host_links` must be more than 0, got 0.0"),
        ("--layers 4 --devices 2 --picture absent/a.png", "No such file or directory: 'absent/a.png'"),
    ],
)
def test_simulate_errors(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_lanes_that_are_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(_words("simulate --lanes many"))
    assert "argument --lanes: must be a whole number or 'auto', not 'many'" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["llama_8b", "qwen3_235b"])
@pytest.mark.slow
def test_plan_of_large_models_on_eight_consumer_gpus(model: str) -> None:
    """Within a minute of a processor, in a process of its own, whose memory tells that no weights were there. One of
    32 billion parameters is an example.
    """
    code = (
        "import resource, sys; from lightning_roundpipe.cli import main; status = main(sys.argv[1:]);"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        "print('seconds', used.ru_utime + used.ru_stime, 'peak', used.ru_maxrss); sys.exit(status)"
    )
    arguments = f"plan --model examples.model_configs:{model} --batch examples.model_configs:tokens"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "roundpipe: fits" in done.stdout or "of host memory" in done.stdout
    seconds, peak = done.stdout.split("seconds")[1].split("peak")
    assert float(seconds) < 60
    assert int(peak) < 3_000_000  # kilobytes; the weights alone are 16 GB and more


def test_picture(tmp_path: Path) -> None:
    found = simulate(gpipe(2, 3), bound([1, 1], [2, 2], 2), Costs([1, 1], [2, 2]))
    for name in ("a.png", "a.svg"):
        draw({"GPipe": found}, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    text = (tmp_path / "a.svg").read_text()
    assert "GPipe" in text and "device 1" in text


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning_roundpipe\[plot\]'"):
        draw({"GPipe": simulate(gpipe(1, 1), bound([1], [2], 1), Costs([1], [2]))}, tmp_path / "a.png")


def test_memory_of_bound_schedules() -> None:
    costs = Costs([1] * 4, [2] * 4, weight_gradient=[1] * 4)
    memory = Memory(limit=0, parameters=[100] * 4, gradients=[1000] * 4, activations=[10] * 4)
    held = {
        outcome.name: bound_memory(outcome, memory, inputs=[1] * 4)
        for outcome in compare(costs, 4, 2, names=("gpipe", "1f1b", "sequential", "zb1p", "dualpipe"))
    }
    share = 2 * (100 + 1000)  # two of four layers
    assert held["gpipe"] == share + 4 * 2 + 10
    assert held["1f1b"] == share + 2 * 2 + 10
    assert held["sequential"] == share + 1 * 2 + 10
    # Device 1: the microbatch whose weight gradients wait, with all it saved, and the one that runs.
    assert held["zb1p"] == share + 2 * 2 + 2 * 2 * 10
    assert held["dualpipe"] >= 2 * share
