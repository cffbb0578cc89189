"""Advice: each message for its own reason, with the argument that changes it, and none in a good run."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_roundpipe.advice import (
    Observed,
    StageTime,
    advise,
    few_microbatches,
    giant_layer,
    long_stage,
    step_not_hidden,
    uploads_not_hidden,
)

GOOD = Observed(
    devices=4,
    microbatches=5,
    split="step",
    staleness=0,
    layers={f"blocks.{i}": 100 for i in range(8)},
    stages=[StageTime("F0", ["blocks.0", "blocks.1"], 1.0), StageTime("B1", ["blocks.7"], 1.4)],
    batch_seconds=1.0,
    optimizer_wait_seconds=0.1,
    upload_wait_seconds=0.1,
)


def test_a_good_run_is_told_nothing() -> None:
    assert advise(GOOD) == []
    assert advise(replace(GOOD, upload_wait_seconds=None, stages=())) == []


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"microbatches": 4}, "RoundPipeStrategy(microbatches=5)"),
        ({"microbatches": 1, "split": "whole"}, "RoundPipeStrategy(split='auto')"),
        ({"stages": [*GOOD.stages, StageTime("B2", ["head"], 6.0)]}, "RoundPipeStrategy(layers=[...])"),
        ({"optimizer_wait_seconds": 0.11}, "RoundPipeStrategy(staleness=1)"),
        ({"optimizer_wait_seconds": 0.11, "staleness": 1}, "Trainer(accumulate_grad_batches=...)"),
        ({"upload_wait_seconds": 0.5}, "DataLoader(batch_size=...)"),
        ({"layers": {**GOOD.layers, "embed": 300}}, "RoundPipeStrategy(layers=[...])"),
    ],
    ids=str,
)
def test_each_reason_has_its_argument(change: dict[str, Any], argument: str) -> None:
    (message,) = advise(replace(GOOD, **change))
    assert argument in message


def test_several_at_once() -> None:
    assert len(advise(replace(GOOD, microbatches=1, upload_wait_seconds=1.0))) == 2


def test_few_microbatches() -> None:
    assert few_microbatches(2, 1, "step") is None
    message = few_microbatches(1, 2, "model")
    assert (
        message is not None and message.startswith("1 microbatch for 2 devices: ") and "at least 3 samples" in message
    )
    assert (few_microbatches(1, 1, "step") or "").startswith("1 microbatch for 1 device: ")


def test_long_stage() -> None:
    """A stage of several layers is as long as was found to be best; what can be changed is a layer."""
    short = [StageTime(f"F{i}", [f"blocks.{i}"], 1.0) for i in range(3)]
    assert long_stage([StageTime("F0", ["net"], 9.0)]) is None, "there is nothing that it is longer than"
    assert long_stage([*short, StageTime("B3", ["blocks.2", "head"], 5.0)]) is None
    assert long_stage([*short, StageTime("B3", ["head"], 1.5)]) is None
    message = long_stage([*short, StageTime("B3", ["head"], 5.0)])
    assert message is not None and "stage B3, the layer 'head' alone, takes 2.5 times as long" in message


def test_waits_are_told_as_shares() -> None:
    assert step_not_hidden(0.2, 2.0, 0) is None
    assert (step_not_hidden(0.5, 2.0, 0) or "").startswith("a batch waits 25 % of its time for the optimizer's step.")
    assert uploads_not_hidden(0.2, 2.0) is None and uploads_not_hidden(None, 2.0) is None
    assert (uploads_not_hidden(1.0, 2.0) or "").startswith("the devices wait 50 % of their time")


def test_giant_layer() -> None:
    assert giant_layer({"all": 10}, 1) is None, "one device's share is everything"
    assert giant_layer({}, 4) is None and giant_layer({"relu": 0}, 4) is None
    assert giant_layer({"embed": 50, "block": 50}, 2) is None
    message = giant_layer({"embed": 51, "block": 49}, 2)
    assert message is not None and "layer 'embed' has 51 % of the parameters" in message
