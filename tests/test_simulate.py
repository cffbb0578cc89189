"""The simulator against closed forms, in exact numbers, and against what can be counted by hand."""

from fractions import Fraction
from itertools import product
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_roundpipe.schedules import (
    Action,
    Partition,
    Schedule,
    dualpipe,
    gpipe,
    interleaved,
    model_parallel,
    one_f_one_b,
    roundpipe,
    sequential,
    zb1p,
)
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.dualpipe import overlapping
from lightning_roundpipe.schedules.simulate import Simulation, batches_of, simulate

DEVICES = (1, 2, 3, 4, 5, 8)
FBW = [(1, 2, 1), (2, 4, 2), (2, 3, 1), (3, 4, 1), (2, 2, 0), (5, 8, 3)]  # all with W <= min(F, B - W)


def cut(forward: list[int], backward: list[int], fused: bool = True) -> Partition:
    """Stages with these numbers of layers: forward ones from the first layer on, backward ones from the last down."""
    starts = [sum(forward[:i]) for i in range(len(forward))]
    stops = [sum(backward) - sum(backward[:i]) for i in range(len(backward))]
    return Partition(
        tuple(range(start, start + size) for start, size in zip(starts, forward, strict=True)),
        tuple(range(stop - size, stop) for stop, size in zip(stops, backward, strict=True)),
        fused,
    )


def percent(share: object) -> float:
    return round(100 * float(share), 2)  # type: ignore[arg-type]


# --- bound stages


def one_layer_each(stages: int) -> Partition:
    return cut([1] * stages, [1] * stages, fused=False)


def run_bound(schedule: Schedule, stages: int, forward: int = 1, backward: int = 2, weight: int = 1) -> Simulation:
    """With ``backward`` as the whole backward's time."""
    costs = Costs([forward] * stages, [backward] * stages, [0] * stages, weight_gradient=[weight] * stages)
    return simulate(schedule, one_layer_each(stages), costs)


@pytest.mark.parametrize(("p", "m"), [*product(DEVICES, (1, 2, 3, 4, 7, 8, 12, 16))])
def test_bubbles_of_bound_schedules(p: int, m: int) -> None:
    layerwise = run_bound(model_parallel(p, m), p)
    assert layerwise.bubble == Fraction(p - 1, p)
    assert layerwise.peak_live == (m,) * p
    single = run_bound(sequential(p, m), p)
    assert single.bubble == Fraction(p - 1, p)
    assert single.peak_live == (1,) * p
    for forward, backward, _ in FBW:
        for schedule in (gpipe(p, m), one_f_one_b(p, m)):
            assert run_bound(schedule, p, forward, backward).bubble == Fraction(p - 1, m + p - 1)
    assert run_bound(gpipe(p, m), p).peak_live == (m,) * p
    assert run_bound(one_f_one_b(p, m), p).peak_live == tuple(min(m, p - i) for i in range(p))


@pytest.mark.parametrize(("p", "groups", "chunks"), [*product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4))])
def test_bubble_of_interleaved(p: int, groups: int, chunks: int) -> None:
    m = p * groups
    interleaving = run_bound(interleaved(p, m, chunks), p * chunks)
    assert interleaving.bubble == Fraction(p - 1, chunks * m + p - 1)
    if chunks > 1 and p > 1:
        assert all(more > less for more, less in zip(interleaving.peak_live, range(min(m, p), 0, -1), strict=False))


@pytest.mark.parametrize(("p", "more"), [*product(DEVICES, (0, 1, 2, 5, 9))])
def test_idle_time_of_zb1p(p: int, more: int) -> None:
    m = p + more
    for forward, backward, weight in [*FBW, (2, 5, 1), (3, 4, 2), (3, 5, 2), (4, 9, 3), (1, 3, 0)]:
        found = run_bound(zb1p(p, m), p, forward, backward, weight)
        assert {parts.total - parts.busy for parts in found.devices} == {(p - 1) * (forward + backward - 2 * weight)}
        assert found.peak_live == (p,) * p


@pytest.mark.parametrize(("half", "more"), [*product((1, 2, 3, 4, 5), (0, 1, 2, 4))])
def test_idle_time_of_dualpipe(half: int, more: int) -> None:
    p, m = 2 * half, 4 * half + 2 * more
    schedule = dualpipe(p, m)
    for forward, backward, weight in FBW:
        costs = Costs([forward] * p, [backward] * p, [0] * p, weight_gradient=[weight] * p)
        for together in (forward + backward, Fraction(9, 10) * (forward + backward)):
            found = simulate(schedule, one_layer_each(p), costs, together=overlapping(schedule), together_time=together)
            middle = found.devices[half]  # the only devices that overlap one pair less
            assert middle.total - middle.busy == (half - 1) * (together + backward - 3 * weight)
            if together == forward + backward:
                assert len({parts.busy for parts in found.devices}) == 1
            assert found.peak_live == (p + 1,) * p
        # On devices that do one thing after the other, the forward's output is there before the backward is through.
        apart = run_bound(schedule, p, forward, backward, weight)
        idle = (half - 1) * (forward + backward - 2 * weight)
        assert {parts.total - parts.busy for parts in apart.devices} == {idle}


@pytest.mark.parametrize(
    ("p", "m", "one", "two", "zero", "dual"), [(4, 8, 27.27, 15.79, 11.11, 7.69), (8, 16, 30.43, 17.95, 12.73, 11.11)]
)
def test_check_values_of_bound_schedules(p: int, m: int, one: float, two: float, zero: float, dual: float) -> None:
    assert percent(run_bound(gpipe(p, m), p).bubble) == one
    assert percent(run_bound(one_f_one_b(p, m), p).bubble) == one
    assert percent(run_bound(interleaved(p, m), 2 * p).bubble) == two
    assert percent(run_bound(zb1p(p, m), p).bubble) == zero
    schedule = dualpipe(p, m)
    costs = Costs([1] * p, [2] * p, [0] * p, weight_gradient=[1] * p)
    assert percent(simulate(schedule, one_layer_each(p), costs, together=overlapping(schedule)).bubble) == dual


def test_the_utilization_that_a_text_has_wrong() -> None:
    assert percent(1 - run_bound(gpipe(8, 4), 8).bubble) == 36.36


# The head is a layer of its own kind, right after which its backward comes: nothing to recompute.
QWEN = Costs([7.43] * 28 + [22.07], [15.83] * 28 + [43.71], [7.43] * 28 + [0], hop=1.6)
LLAMA = Costs([18.5] * 32 + [37.23], [41.21] * 32 + [74.5], [18.5] * 32 + [0], hop=3.2)


def check_percent(bubble: object, expected: float) -> None:
    """The layers' times are rounded, which shifts the last digit."""
    assert 100 * float(bubble) == pytest.approx(expected, abs=0.0051)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "layers", "in_gpipe", "in_1f1b"),
    [(QWEN, [4, 4, 4, 4, 4, 3, 3, 3], 36.13, 35.19), (LLAMA, [4, 4, 4, 4, 4, 4, 4, 5], 42.08, 42.08)],
    ids=["Qwen3-1.7B", "Llama-3.1-8B"],
)
def test_bound_schedules_with_times_of_real_models(
    costs: Costs, layers: list[int], in_gpipe: float, in_1f1b: float
) -> None:
    partition = cut(layers, layers[::-1], fused=False)
    check_percent(simulate(gpipe(8, 16), partition, costs).bubble, in_gpipe)
    check_percent(simulate(one_f_one_b(8, 16), partition, costs).bubble, in_1f1b)


@pytest.mark.parametrize(
    ("costs", "layers", "bubble"),
    [(QWEN, [1] * 18 + [2] * 5 + [1], 27.75), (LLAMA, [1] * 31 + [2], 30.64)],
    ids=["Qwen3-1.7B", "Llama-3.1-8B"],
)
def test_interleaved_with_times_of_real_models(costs: Costs, layers: list[int], bubble: float) -> None:
    """As many stages per device as there are layers for: three and four."""
    partition = cut(layers, layers[::-1], fused=False)
    check_percent(simulate(interleaved(8, 16, len(layers) // 8), partition, costs).bubble, bubble)


def by_the_paper_s_rule(costs: Costs, m: int, n: int) -> tuple[int, int, int]:
    """Numbers of forward stages, of layers in the fused stage besides the head, and of the other backward stages.

    The longest stage t is such that (M S + N(N-1)) t is least, with as few stages as it allows. Layers are equal.
    """
    layers = len(costs.forward) - 1
    forward, both = costs.forward[0], costs.backward_with_recompute()[0]
    head = costs.forward[-1] + costs.backward[-1]
    lengths = {size * one for size in range(1, layers + 1) for one in (forward, both)}
    found = {}
    for t in lengths | {head + size * both for size in range(layers)}:
        if t >= max(both, head):
            fused = int((t - head) // both)
            split = ceil((layers - fused) / (t // forward)), fused, ceil((layers - fused) / (t // both))
            found[(m * (split[0] + 1 + split[2]) + n * (n - 1)) * t] = split
    return found[min(found)]


@pytest.mark.parametrize(
    ("costs", "forward", "backward", "bubble"),
    [
        (QWEN, [7] * 4, [1] + [3] * 8 + [2] * 2, 1.08),
        (QWEN, [7] * 4, [1] + [2] * 2 + [3] * 8, 1.08),
        (LLAMA, [6, 6, 5, 5, 5, 5], [1] + [2] * 16, 0.95),
        (LLAMA, [5, 5, 5, 5, 6, 6], [1] + [2] * 16, 0.95),
    ],
)
def test_roundpipe_with_times_of_real_models(
    costs: Costs, forward: list[int], backward: list[int], bubble: float
) -> None:
    """In steady state, with as many stages as the paper's rule gives, as equal as they can be."""
    assert by_the_paper_s_rule(costs, 16, 8) == (len(forward), backward[0] - 1, len(backward) - 1)
    partition = cut(forward, backward)
    check_percent(simulate(batches_of(partition, 16, 8, 24), partition, costs, staleness=1).steady_bubble, bubble)


# --- RoundPipe, equal stages: a layer per stage, of which the fused one is twice as heavy as its forward


def equal(stages: int, time: int, **more: object) -> tuple[Partition, Costs]:
    """Only backward stages, and as little recompute as leaves each of them the same time."""
    partition = cut([], [1] * stages, fused=False)
    return partition, Costs([0] * stages, [time] * stages, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "m"), [*product(DEVICES, (1, 2, 3, 5, 8, 9, 16))])
def test_one_batch_alone(n: int, m: int) -> None:
    t = 3
    for stages, hop, upload in product((1, 2, 3, 7, 8, 16, 17, 20), (0, 1, 2), (0, 2)):
        partition, costs = equal(stages, t, hop=hop, upload=[upload] * stages)
        found = simulate(roundpipe(partition, m, n), partition, costs)
        full, rest = divmod(stages - 1, n)
        expected = full * max(m * t, n * (t + hop)) + rest * (t + hop) + m * t
        if upload <= m * t:
            assert found.makespan == expected + upload
        if not hop and not upload:
            if m >= n and stages % n == 0:
                assert found.bubble == Fraction(n * (n - 1), m * stages + n * (n - 1))
            if m <= n:
                assert found.bubble == 1 - Fraction(stages * m, n * (stages + m - 1))


def test_stages_that_the_devices_do_not_divide() -> None:
    partition, costs = equal(17, 1)
    assert percent(simulate(roundpipe(partition, 32, 8), partition, costs).bubble) == 29.17
    assert percent(Fraction(8 * 7, 32 * 17 + 8 * 7)) == 9.33


@pytest.mark.parametrize(("n", "m"), [*product((1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 8, 9))])
def test_steady_state(n: int, m: int) -> None:
    t = 2
    for stages, hop in product((1, 2, 3, 4, 5, 8, 11), (0, 1)):
        partition, costs = equal(stages, t, hop=hop)
        # As many batches under way as the devices allow: neither parameters nor losses hold one up.
        schedules = batches_of(partition, m, n, 6 * n)
        found = simulate(schedules, partition, costs, staleness=6 * n, returns_at_losses=False)
        if m * t >= n * (t + hop):
            assert found.period == Fraction(stages * m * t, n)
            assert found.steady_bubble == 0
        else:
            assert found.period == stages * (t + hop) - Fraction(n * (t + hop) - m * t, ceil(Fraction(n, stages)))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_restarting_at_the_first_device(n: int) -> None:
    for stages in range(1, 3 * n):
        partition, costs = equal(stages, 1)
        schedules = [roundpipe(partition, n, n)] * 12
        found = simulate(schedules, partition, costs, staleness=n, returns_at_losses=False)
        assert found.steady_bubble == 1 - Fraction(stages, n * ceil(Fraction(stages, n)))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_microbatches_needed_for_no_bubble(n: int) -> None:
    stages, t = 2 * n, 12
    for m, hop in product((n - 1, n, n + 1), (0, 1, Fraction(t, n), Fraction(t, n) + 1)):
        partition, costs = equal(stages, t, hop=hop)
        found = simulate(batches_of(partition, m, n, 3 * n), partition, costs, staleness=1, returns_at_losses=False)
        assert (found.steady_bubble == 0) == (m * t >= n * (t + hop))
        assert (m * t >= n * (t + hop)) == ((m >= n + 1 and hop <= Fraction(t, n)) or (m >= n and hop == 0))


@pytest.mark.parametrize(("before", "after", "m"), [*product((1, 3, 5), (1, 3, 5), (1, 2, 7))])
def test_a_drop_of_stage_times_costs_and_a_rise_does_not(before: int, after: int, m: int) -> None:
    """A cheaper stage waits for each input but the first of the dearer one before it."""
    partition, _ = equal(2, 1)
    found = simulate(roundpipe(partition, m, 2), partition, Costs([0, 0], [after, before]))
    second = [span for span in found.actions if span.device == 1]
    assert second[-1].end - second[0].start - m * after == (m - 1) * max(before - after, 0)


@pytest.mark.parametrize(("n", "more"), [*product((2, 3, 4), (1, 2))])
def test_what_a_drop_costs_in_steady_state(n: int, more: int) -> None:
    """One dearer stage, after which times drop; with M = N nothing makes up for it."""
    partition, _ = equal(3 * n, 1)
    for at in range(3 * n):
        times = [3] * (3 * n)
        times[at] += more
        schedules = batches_of(partition, n, n, 6 * n)
        found = simulate(schedules, partition, Costs([0] * 3 * n, times), staleness=n, returns_at_losses=False)
        assert found.period - Fraction(n * sum(times), n) == (n - 1) * more


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 5), (4, 4), (4, 6)])
def test_how_long_the_optimizer_may_take(n: int, m: int) -> None:
    t, stages = 2, 3 * n
    period = Fraction(stages * m * t, n)
    partition, _ = equal(stages, t)
    span = simulate(roundpipe(partition, m, n), partition, equal(stages, t)[1]).makespan
    limit = min(period, 2 * period - span)
    for takes in (limit - 1, limit, limit + 1):
        # All parameters are there when the first stage's are: those of the last layer, which backward begins with.
        optimizer = [takes] + [0] * (stages - 1)
        costs = Costs([0] * stages, [t] * stages, optimizer=optimizer)
        schedules = batches_of(partition, m, n, 24)
        found = simulate(schedules, partition, costs, staleness=1, returns_at_losses=False)
        assert (found.steady_bubble == 0) == (takes <= limit)
        if takes > limit:
            assert any(parts.optimizer for parts in found.steady)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 5), (4, 4), (4, 6)])
def test_uploads_with_and_without_one_stage_ahead(n: int, m: int) -> None:
    t, stages = 3, 2 * n
    for upload in (1, m * t, m * t + 1):
        partition, costs = equal(stages, t, upload=[upload] * stages)
        schedules = batches_of(partition, m, n, 12)
        ahead = simulate(schedules, partition, costs, staleness=n, returns_at_losses=False)
        assert (ahead.steady_bubble == 0) == (upload <= m * t)
        assert any(parts.upload for parts in ahead.steady) == (upload > m * t)
        not_ahead = simulate(schedules, partition, costs, staleness=n, prefetch=0, returns_at_losses=False)
        assert not_ahead.period == Fraction(stages * (m * t + upload), n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_backward_stages_needed_because_the_next_batch_waits_for_the_losses(n: int) -> None:
    stages = 3 * n
    for backward in range(2, stages):
        forward = stages - backward
        below = max(forward, backward - 1)  # layers below the fused one, those that are too many for either way free
        partition = cut([1] * (forward - 1) + [below - forward + 1], [1, below - backward + 2] + [1] * (backward - 2))
        costs = Costs(
            [2] * forward + [0] * (below - forward) + [1],
            [2] * (backward - 1) + [0] * (below - backward + 1) + [1],
            [0] * (below + 1),
        )
        found = simulate(batches_of(partition, n, n, 6 * n), partition, costs, staleness=1)
        assert {span.end - span.start for span in found.actions} == {2}
        assert (found.steady_bubble == 0) == (backward >= n)


def check_values(forward: list[int], backward: list[int]) -> tuple[Partition, Costs]:
    layers = sum(backward)
    return cut(forward, backward), Costs([1] * layers, [2] * layers)


ASYMMETRIC = [1] + [3] * 10, [1] * 32
FINEST = [1] * 31, [1] * 32


@pytest.mark.parametrize(
    ("split", "n", "m", "lanes", "bubble"),
    [
        (ASYMMETRIC, 8, 16, 1, 13.01),
        (ASYMMETRIC, 4, 5, 1, 6.07),
        (FINEST, 8, 9, 1, 12.35),
        (FINEST, 8, 16, 1, 7.30),
        (FINEST, 4, 5, 1, 4.94),
        (ASYMMETRIC, 8, 16, 2, 5.22),
        (ASYMMETRIC, 8, 32, 4, 0.78),
        (ASYMMETRIC, 8, 32, 8, 0.00),
    ],
)
def test_check_values_alone(split: tuple[list[int], list[int]], n: int, m: int, lanes: int, bubble: float) -> None:
    partition, costs = check_values(*split)
    assert percent(simulate(roundpipe(partition, m, n, lanes=lanes), partition, costs).bubble) == bubble


@pytest.mark.parametrize(("split", "bubble"), [(ASYMMETRIC, 1.17), (([6] * 5, [2] * 16), 0.0)])
def test_check_values_in_steady_state(split: tuple[list[int], list[int]], bubble: float) -> None:
    partition, costs = check_values(*split)
    if split is not ASYMMETRIC:  # the fused stage of two layers would take 6 = 2 * (1 + 2): as long as the others
        assert len(partition.backward[0]) == 2
    found = simulate(batches_of(partition, 16, 8, 24), partition, costs, staleness=1)
    assert percent(found.steady_bubble) == bubble


@pytest.mark.parametrize(("m", "rounds", "bubble"), [(16, 2, 8.30), (32, 4, 5.05), (32, 8, 46.81)])
def test_sequential_rounds_instead_of_lanes(m: int, rounds: int, bubble: float) -> None:
    partition, costs = check_values(*ASYMMETRIC)
    schedules = batches_of(partition, m // rounds, 8, rounds)
    found = simulate(schedules, partition, costs, staleness=rounds, returns_at_losses=False)
    assert percent(found.bubble) == bubble


@st.composite
def uneven(draw: st.DrawFn) -> tuple[list[int], int, int]:
    n = draw(st.integers(1, 5))
    return draw(st.lists(st.integers(1, 9), min_size=2 * n, max_size=16)), n, draw(st.integers(1, 8))


@given(uneven())
def test_lower_bound_with_one_upload_per_stage(shape: tuple[list[int], int, int]) -> None:
    times, n, m = shape
    partition, _ = equal(len(times), 1)
    found = simulate(roundpipe(partition, m, n), partition, Costs([0] * len(times), times[::-1]))
    idle = sum(parts.total - parts.busy for parts in found.devices)
    assert idle >= sum((n - j) * (times[j - 1] + times[-j]) for j in range(1, n))
    if len(set(times)) == 1 and m >= n and len(times) % n == 0:
        assert idle == n * (n - 1) * times[0]


@pytest.mark.parametrize(("width", "lanes", "share"), [*product((1, 2, 4), (1, 2, 4), (4, 5))])
def test_idle_time_of_lanes(width: int, lanes: int, share: int) -> None:
    partition, costs = equal(4 * width, 3)
    found = simulate(roundpipe(partition, lanes * share, lanes * width, lanes=lanes), partition, costs)
    assert sum(parts.total - parts.busy for parts in found.devices) == lanes * width * (width - 1) * 3
    assert len(found.uploads) == lanes * partition.stage_count()


@pytest.mark.parametrize("fused", [1, 2, 4])
def test_useful_utilization_with_full_recompute(fused: int) -> None:
    """Of the time that is not bubble, all but one of four forwards, the fused layers' excepted."""
    layers = 16
    partition = cut(
        [4] * ((layers - fused) // 4) + ([(layers - fused) % 4] if (layers - fused) % 4 else []),
        [fused] + [1] * (layers - fused),
    )
    found = simulate(batches_of(partition, 8, 4, 24), partition, Costs([1] * layers, [2] * layers), staleness=1)
    assert found.utilization == Fraction(3 * layers, 4 * layers - fused) * (1 - found.steady_bubble)


# --- recomputing before the gradient arrives


@pytest.mark.parametrize(("p", "m"), [*product(DEVICES, (1, 2, 3, 8, 12))])
def test_bound_schedules_that_recompute_early(p: int, m: int) -> None:
    """The recompute of one microbatch per device falls into the time in which it waits anyway, but for the last."""
    for forward, backward, recompute in ((1, 2, 1), (3, 5, 3), (2, 3, 1)):
        costs = Costs([forward] * p, [backward] * p, [recompute] * p)
        for schedule in (gpipe(p, m), one_f_one_b(p, m)):
            found = simulate(schedule, one_layer_each(p), costs, recomputes_early=True)
            late = simulate(schedule, one_layer_each(p), costs)
            assert found.makespan == (m + p - 1) * (forward + backward) + m * recompute
            assert late.makespan - found.makespan == (p - 1) * recompute
            assert {parts.total for parts in found.devices} == {found.makespan}
            assert {parts.busy for parts in found.devices} == {m * (forward + backward + recompute)}


@pytest.mark.parametrize(("n", "more"), [*product(DEVICES, (0, 1, 5))])
def test_roundpipe_that_recomputes_early(n: int, more: int) -> None:
    """One forward stage, a fused one, and more of the same time: these begin a recompute earlier, if they need not
    wait for their device."""
    t, m = 6, n + more
    for backward, recompute, hop in product((1, 2, 3, 7, 16), (0, 2, 5), (0, 1)):
        if m * t < n * (t + hop):
            continue
        below, stages = backward - 1, backward + 1
        if not below:
            continue
        partition = cut([below], [1] * backward)
        costs = Costs(
            [t] + [0] * below, [t - recompute] * below + [t], [recompute] * below + [0], hop=hop
        )  # fmt: skip
        found = simulate(roundpipe(partition, m, n), partition, costs, recomputes_early=True)
        full, rest = divmod(stages - 1, n)
        assert found.makespan == full * m * t + rest * (t + hop) - max(rest - 1, 0) * recompute + m * t


def test_recomputing_early_by_hand() -> None:
    """Two stages on two devices: the first recomputes while the second computes what it waits for."""
    costs = Costs([2, 2], [3, 3], [1, 1], hop=4)
    partition = one_layer_each(2)
    found = simulate(gpipe(2, 1), partition, costs, recomputes_early=True)
    assert [(str(s.action), s.device, s.start, s.end) for s in found.actions] == [
        ("F0·mb0", 0, 0, 2),
        ("B3·mb0", 0, 2, 19),  # recomputes until 3; the gradient comes at 16
        ("F1·mb0", 1, 6, 8),
        ("B2·mb0", 1, 8, 12),
    ]
    assert [parts.busy for parts in found.devices] == [6, 6]
    assert [parts.bubble for parts in found.devices] == [13, 13]


@given(uneven(), st.integers(0, 3), st.integers(0, 2), st.sampled_from([0, 1]))
def test_recomputing_early_is_never_slower(
    shape: tuple[list[int], int, int], upload: int, hop: int, staleness: int
) -> None:
    times, n, m = shape
    layers = len(times)
    costs = Costs(times, times[::-1], times, upload=[upload] * layers, optimizer=[1] * layers, hop=hop)
    partition = cut([1] * (layers - 1), [1] * layers)
    schedules = batches_of(partition, m, n, 3)
    late, early = (
        simulate(schedules, partition, costs, staleness=staleness, recomputes_early=early) for early in (False, True)
    )
    assert all(a <= b for a, b in zip(early.ends, late.ends, strict=True))
    assert {parts.total for parts in early.devices} == {early.makespan}
    assert sum(p.busy for p in early.devices) == sum(p.busy for p in late.devices)
    assert all(min(p.bubble, p.upload, p.optimizer) >= 0 for p in early.devices)


# --- by hand


def test_by_hand() -> None:
    """Two stages each way on two devices, two microbatches, one layer per stage; every copy and step in its place."""
    partition = cut([1], [1, 1])
    costs = Costs([2, 1], [3, 2], upload=[4, 5], download=[6, 7], optimizer=[8, 9], parameters=[10, 20], hop=1)
    found = simulate(batches_of(partition, 2, 2, 2), partition, costs)
    assert [(str(s.action), s.device, s.start, s.end) for s in found.actions if s.batch == 0] == [
        ("F0·mb0", 0, 4, 6),
        ("F0·mb1", 0, 6, 8),
        ("FB1·mb0", 1, 7, 10),  # one hop after its input, and when the parameters have come
        ("FB1·mb1", 1, 10, 13),
        ("B2·mb0", 0, 11, 16),  # recomputes
        ("B2·mb1", 0, 16, 21),
    ]
    assert [(s.device, s.start, s.end) for s in found.uploads if s.batch == 0] == [(0, 0, 4), (1, 0, 5), (0, 4, 8)]
    assert [(s.device, s.start, s.end) for s in found.downloads if s.batch == 0] == [(1, 13, 20), (0, 21, 27)]
    assert found.steps[0] == (27, 44)
    # The next batch begins on device 1, with layer 0: stepped at 35, there at 39.
    assert [(str(s.action), s.device, s.start, s.end) for s in found.actions if s.batch == 1][:2] == [
        ("F0·mb0", 1, 39, 41),
        ("F0·mb1", 1, 41, 43),
    ]
    first, second = found.by_batch[1]
    assert (first.busy, second.busy) == (6, 14)
    assert (first.bubble, first.optimizer, first.upload) == (6 + 3, 8 + 2, 4 + 5)  # what F0 waited for, then FB1
    assert (second.bubble, second.optimizer, second.upload) == (14 + 4, 8 + 1, 4 + 5)  # F0, then B2 for FB1
    assert found.peak_parameters == (10 + 20, 10 + 20)
    assert found.peak_live == (1, 1)


def test_parts_make_up_the_makespan() -> None:
    partition, costs = check_values(*ASYMMETRIC)
    costs = Costs(costs.forward, costs.backward, upload=[2] * 32, optimizer=[1] * 32, download=[1] * 32, hop=1)
    for staleness in (0, 1):
        found = simulate(batches_of(partition, 9, 4, 4), partition, costs, staleness=staleness)
        assert {parts.total for parts in found.devices} == {found.makespan}
        assert sum(parts.busy for parts in found.devices) == 4 * 9 * (31 + 3 + 31 * 3)
        last = max(span.end for span in found.actions)
        assert found.makespan == last


def test_host_memory_that_several_uploads_share() -> None:
    """Two links' worth for four devices: each upload holds up the next by half of its time."""
    partition, _ = equal(4, 1)
    costs = Costs([0] * 4, [1] * 4, upload=[8] * 4, host_links=2)
    found = simulate(roundpipe(partition, 4, 4), partition, costs)
    assert [(span.device, span.start) for span in found.uploads] == [(0, 0), (1, 4), (2, 8), (3, 12)]


def test_adding_the_gradients_of_lanes() -> None:
    partition, _ = equal(4, 1)
    costs = Costs([0] * 4, [1] * 4, optimizer=[2] * 4, add=[3] * 4)
    for lanes in (1, 2, 4):
        start, end = simulate(roundpipe(partition, 4, 4, lanes=lanes), partition, costs).steps[0]
        assert end - start == 4 * (2 + 3 * (lanes - 1))


def test_parameters_of_bound_stages_are_held_once() -> None:
    costs = Costs([1] * 4, [2] * 4, parameters=[1, 2, 3, 4], upload=[1] * 4)
    found = simulate(gpipe(2, 3), cut([2, 2], [2, 2], fused=False), costs)
    assert found.peak_parameters == (3, 7)
    assert len(found.uploads) == 2 and len(found.downloads) == 2
    both = simulate(dualpipe(2, 4), cut([2, 2], [2, 2], fused=False), costs)
    assert both.peak_parameters == (10, 10)  # two copies of everything


def test_floats_and_fractions_agree() -> None:
    partition, exact = check_values(*ASYMMETRIC)
    rounded = Costs([float(x) for x in exact.forward], [float(x) for x in exact.backward])
    for staleness in (0, 1):
        a, b = (
            simulate(batches_of(partition, 16, 8, 24), partition, costs, staleness=staleness)
            for costs in (exact, rounded)
        )
        assert isinstance(a.period, Fraction) and isinstance(b.period, float)
        assert float(a.period) == pytest.approx(b.period)


def test_a_schedule_that_can_never_run() -> None:
    schedule = Schedule(((Action("B", 1, 0), Action("F", 0, 0)),), 0)
    with pytest.raises(ValueError, match="never run B1·mb0"):
        simulate(schedule, cut([1], [1], fused=False), Costs([1], [2]))


def test_nothing_to_do() -> None:
    found = simulate(Schedule(((), ()), 0), Partition((), (), False), Costs([], []))
    assert found.makespan == 0 and found.period == 0 and found.bubble == 1
    assert found.peak_live == (0, 0)


def test_costs_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="2 forward times, but 1 of upload"):
        Costs([1, 1], [2, 2], upload=[1])
