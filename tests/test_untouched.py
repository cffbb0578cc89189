"""Between steps, and after `fit`, the user's module is an ordinary module: it copies, pickles, exports, saves and
trains by itself.
"""

import copy
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import (
    Batches,
    RoundPipeStrategy,
    Watch,
    assert_alike,
    assert_equal,
    differs,
    fit,
    fit_microbatches,
    fit_pipeline,
    plain_loop,
    weights,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from models import CNN, GPT, MLP, SGD, Lit, Recurrent, batches_of, pictures, sequences, tokens, vectors
from torch import Tensor, nn

KINDS: dict[str, tuple[Any, Any]] = {
    "mlp": (MLP, vectors),
    "gpt": (GPT, tokens),
    "cnn": (CNN, pictures),
    "lstm": (partial(Recurrent, nn.LSTM), sequences),
}
HOOK_TABLES = [name for name in vars(nn.Module()) if "hooks" in name]


def make(name: str, dtype: torch.dtype = torch.float64) -> Lit:
    torch.manual_seed(7)
    return KINDS[name][0]().to(dtype)


def data(name: str, count: int = 3, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    return batches_of(KINDS[name][1], count, 6, dtype)


class Outputs(L.Callback):
    """At the end of every batch: copies of the module, made in every way, and what they hold and compute."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with torch.no_grad():
            self.found.append(
                {"state": weights(module), "parameters": [p.detach().clone() for p in module.parameters()]}
            )
            for kind, copied in (
                ("deepcopy", copy.deepcopy(module)),
                ("pickle", pickle.loads(pickle.dumps(module))),
                ("children", nn.ModuleDict(dict(copy.deepcopy(module).named_children()))),
            ):
                assert type(copied) is type(module) or kind == "children"
                self.found[-1][kind] = weights(copied)
                if isinstance(copied, Lit):
                    copied.eval()
                    self.found[-1][kind + " computes"] = copied.loss(batch)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_copies_between_steps(name: str, devices: int) -> None:
    """They hold the weights after the step just made, as in plain Lightning, and run on their own."""
    found = []
    for strategy in (RoundPipeStrategy(microbatches=1), "auto"):
        callback = Outputs()
        fit(make(name), data(name), strategy, devices=1 if strategy == "auto" else devices, callbacks=[callback])
        found.append(callback.found)
    assert len(found[1]) == 3 and differs(found[1][2]["state"], found[1][0]["state"])
    assert_equal(*found)


def test_copies_between_steps_with_microbatches() -> None:
    callback, watch = Outputs(), Watch(parameters=True)
    fit_pipeline(make("gpt"), data("gpt"), 3, devices=2, run={"callbacks": [callback]})
    fit_microbatches(make("gpt"), data("gpt"), 3, callbacks=[watch])
    expected = watch.weights[2::3]
    for kind in ("state", "deepcopy", "pickle"):
        assert_equal([found[kind] for found in callback.found], expected, kind)


def test_a_copy_made_between_steps_trains_by_itself() -> None:
    class Copy(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            copies.append(copy.deepcopy(module))

    copies: list[Any] = []
    fit_pipeline(make("mlp"), data("mlp"), 3, devices=2, run={"callbacks": [Copy()]})
    first, last = copies[0], copies[-1]
    assert differs(weights(first), weights(last))
    expected = make("mlp")
    expected.load_state_dict(first.state_dict())
    for model in (first, expected):
        plain_loop(model, lambda model, part: model.loss(part), data("mlp"), 2, SGD)
    assert_equal(weights(first), weights(expected))


def test_export_between_steps() -> None:
    class Export(L.Callback):
        def on_train_batch_end(
            self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1:
                program = torch.export.export(module.net, (batch["x"],))
                state = {name: value.detach().clone() for name, value in program.state_dict.items()}
                exported.append((program.module()(batch["x"]), module.net(batch["x"]), state))

    exported: list[Any] = []
    fit_pipeline(make("mlp"), data("mlp"), 3, devices=2, run={"callbacks": [Export()]})
    ((by_program, by_module, state),) = exported
    assert torch.equal(by_program, by_module)
    plain = make("mlp")
    fit_microbatches(plain, data("mlp")[:2], 3)
    assert_equal(state, weights(plain.net))


# --- nothing is left on the module


def anatomy(module: nn.Module) -> dict[str, Any]:
    """All that could be put on a module: its attributes' names, class, hooks, and identity and kind of its tensors."""
    found: dict[str, Any] = {}
    for name, sub in module.named_modules():
        found[name] = {
            "class": type(sub),
            "forward": type(sub).forward,
            "attributes": sorted(vars(sub)),
            "hooks": {table: list(vars(sub).get(table) or ()) for table in HOOK_TABLES},
            "parameters": {key: id(p) for key, p in sub._parameters.items()},
            "buffers": sorted(sub._buffers),
            "training": sub.training,
        }
    for name, p in module.named_parameters():
        found["parameter " + name] = {
            "class": type(p),
            "leaf": p.is_leaf,
            "requires_grad": p.requires_grad,
            "device": p.device,
            "dtype": p.dtype,
            "stride": p.stride(),
            "hooks": (p._backward_hooks, p._post_accumulate_grad_hooks),
            "attributes": sorted(vars(p)),
        }
    return found


def of_children(found: dict[str, Any]) -> dict[str, Any]:
    """Without the LightningModule itself, on which Lightning puts its own attributes."""
    return {name: value for name, value in found.items() if name}


@pytest.mark.parametrize(
    "options", [{}, {"staleness": 1}, {"background_step": False}, {"layers": [nn.Linear]}], ids=str
)
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_left_on_the_module(name: str, options: dict) -> None:
    class Look(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            during.append(of_children(anatomy(module)))

        on_train_batch_end = on_train_batch_start

    ours, plain = make(name), make(name)
    before = of_children(anatomy(ours))
    during: list[dict[str, Any]] = []
    fit_pipeline(ours, data(name), 2, devices=2, run={"callbacks": [Look()]}, **options)
    assert len(during) == 6 and all(found == before for found in during)
    assert of_children(anatomy(ours)) == before
    fit(plain, data(name))
    assert sorted(vars(ours)) == sorted(vars(plain))
    own, expected = anatomy(ours)[""], anatomy(plain)[""]
    assert {k: v for k, v in own.items() if k != "parameters"} == {
        k: v for k, v in expected.items() if k != "parameters"
    }


def test_nothing_is_left_after_an_error() -> None:
    class Fails(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise ValueError("bad row")
            return loss

    torch.manual_seed(7)
    model = Fails().double()
    before = of_children(anatomy(model))
    with pytest.raises(ValueError, match="bad row"):
        fit_pipeline(model, data("mlp"), 2, devices=2)
    assert of_children(anatomy(model)) == before


def test_the_user_s_own_forward_and_hooks_stay() -> None:
    """A forward put on an instance, as adapters do, is called by the pipeline and is there afterwards; hooks run once
    per call.
    """
    model, plain = make("mlp"), make("mlp")
    for lightning_module in (model, plain):
        net = lightning_module.net
        calls = lightning_module.calls = []  # type: ignore[assignment]
        linear = net[0]
        linear.forward = lambda x, linear=linear: 2 * type(linear).forward(linear, x)
        net[2].register_forward_hook(lambda *_, calls=calls: calls.append("layer"))
        net[3][0].register_forward_hook(lambda *_, calls=calls: calls.append("inside"))
        net[2].register_forward_pre_hook(lambda *_, calls=calls: calls.append("pre"))
    own = vars(model.net[0])["forward"]
    fit_pipeline(model, data("mlp"), 2, devices=2)
    fit_microbatches(plain, data("mlp"), 2)
    assert sorted(model.calls) == sorted(plain.calls) and len(plain.calls) == 18
    assert vars(model.net[0])["forward"] is own
    assert_equal(weights(model), weights(plain))


def test_plain_pytorch_goes_on_after_fit() -> None:
    ours, plain = make("gpt"), make("gpt")
    fit_pipeline(ours, data("gpt"), 2, devices=2)
    fit_microbatches(plain, data("gpt"), 2)
    for model in (ours, plain):
        model.zero_grad()
        plain_loop(model, lambda model, part: model.loss(part), data("gpt"), 2, SGD)
    assert_equal(weights(ours), weights(plain))
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


def process_state() -> dict[str, Any]:
    """What a library could change for the whole process."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "modes": torch._C._len_torch_function_stack(),
        "dispatch": torch._C._len_torch_dispatch_stack(),
        "call": (
            nn.Module.__call__,
            nn.Module.__getattr__,
            nn.Module.__setattr__,
            nn.Linear.forward,
            torch.Tensor.backward,
        ),
        "global hooks": [
            len(table)
            for name, table in vars(nn.modules.module).items()
            if name.startswith("_global_") and hasattr(table, "__len__")
        ],
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads alive": threading.active_count(),
    }


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_nothing_is_left_on_the_process(precision: str) -> None:
    before = process_state()
    fit_pipeline(
        make("mlp", torch.float32), data("mlp", dtype=torch.float32), 3, devices=2, run={"precision": precision}
    )
    assert process_state() == before


# --- checkpoints are ordinary files


IN_ANOTHER_PROCESS = """
import sys
import lightning as L, torch
from torch.utils.data import DataLoader
from models import MLP, batches_of, vectors

path = sys.argv[1]
saved = torch.load(path, weights_only=False)
batches = batches_of(vectors, 3, 6)
model = MLP.load_from_checkpoint(path, weights_only=False, map_location="cpu").double()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, **quiet)
trainer.fit(model, DataLoader(batches, batch_size=None), ckpt_path=path, weights_only=False)
assert "lightning_roundpipe" not in sys.modules
torch.save({"loaded": saved["state_dict"], "trained": model.state_dict(), "step": trainer.global_step}, sys.argv[2])
"""


def test_a_process_without_us_loads_the_checkpoint(tmp_path: Path) -> None:
    """Saved by ours, it goes on in plain Lightning where the package is not imported."""
    saved = []
    for name, strategy, devices in (("ours", RoundPipeStrategy(microbatches=1), 2), ("plain", "auto", 1)):
        trainer = fit(make("mlp"), data("mlp"), strategy, devices=devices)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        saved.append(trainer)
    script = tmp_path / "go_on.py"
    script.write_text(IN_ANOTHER_PROCESS)
    environment = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, str(script), str(tmp_path / "ours.ckpt"), str(tmp_path / "result.pt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "result.pt")

    plain = saved[1].lightning_module
    assert_equal(dict(found["loaded"]), weights(plain))
    further = make("mlp")
    goes_on = fit(further, data("mlp"), ckpt_path=str(tmp_path / "plain.ckpt"), max_epochs=2)
    assert found["step"] == goes_on.global_step == 6
    assert_equal(dict(found["trained"]), weights(further))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_checkpoint_holds_what_plain_lightning_s_holds(tmp_path: Path, name: str, precision: str) -> None:
    """Keys, kinds and sizes: each tensor alone in its storage, in fp32, on the CPU."""
    sizes, contents = [], []
    for kind, strategy, devices in (("ours", RoundPipeStrategy(microbatches=2), 2), ("plain", "auto", 1)):
        saver = ModelCheckpoint(tmp_path / kind, "saved", every_n_train_steps=2)
        batches = data(name, 2, torch.float32)
        run = {"precision": precision, "callbacks": [saver], "enable_checkpointing": True}
        fit(make(name, torch.float32), batches, strategy, devices=devices, **run)
        path = tmp_path / kind / "saved.ckpt"
        sizes.append(path.stat().st_size)
        contents.append(torch.load(path, weights_only=False))
    ours, plain = contents
    assert list(ours["state_dict"]) == list(plain["state_dict"])
    for key, value in ours["state_dict"].items():
        assert value.dtype == plain["state_dict"][key].dtype and value.device.type == "cpu" and type(value) is Tensor
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), key
    for mine, theirs in zip(ours["optimizer_states"], plain["optimizer_states"], strict=True):
        assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            assert {k: v.dtype for k, v in mine["state"][index].items()} == {k: v.dtype for k, v in state.items()}
    assert set(plain) <= set(ours) and set(plain["loops"]) == set(ours["loops"])
    assert abs(sizes[0] - sizes[1]) < 0.1 * sizes[1] + 6000, "random state and the like, but no second copy of anything"
    path = tmp_path / "ours" / "saved.ckpt"
    assert_equal(dict(torch.load(path, weights_only=True)["state_dict"]), dict(ours["state_dict"]))


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(2, 1), (1, 4), (4, 2)])
def test_a_checkpoint_knows_no_devices(tmp_path: Path, saved_with: int, loaded_with: int) -> None:
    path = str(tmp_path / "saved.ckpt")
    straight = make("gpt")
    fit_microbatches(straight, data("gpt") * 2, 2)
    first = fit_pipeline(make("gpt"), data("gpt"), 2, devices=saved_with)
    first.save_checkpoint(path)
    second = make("gpt")
    fit_pipeline(second, data("gpt"), 2, devices=loaded_with, run={"ckpt_path": path, "max_epochs": 2})
    assert_equal(weights(second), weights(straight))


def test_state_dict_of_the_optimizer_right_after_a_step() -> None:
    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            states.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))

    found = []
    for run in (partial(fit_pipeline, devices=2), fit_microbatches):
        states: list[Any] = []
        options = {"callbacks": [Look()]}
        model = make("gpt")
        if run is fit_microbatches:
            fit_microbatches(model, data("gpt"), 2, **options)
            states = states[1::2]
        else:
            fit_pipeline(model, data("gpt"), 2, devices=2, run=options)
        found.append(states)
    assert len(found[1]) == 3
    assert_equal(*found)


def test_validation_and_prediction_leave_nothing() -> None:
    model = make("mlp")
    trainer = fit_pipeline(model, data("mlp"), 2, devices=2)
    before, state = of_children(anatomy(model.train())), weights(model)
    trainer.validate(model, Batches(data("mlp")), verbose=False)
    trainer.predict(model, Batches(data("mlp")))
    assert of_children(anatomy(model.train())) == before
    assert_alike(weights(model), state, 0.0)
