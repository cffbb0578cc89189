"""Two devices' worth: two virtual devices of one thread each, against the ceiling and against others on two cores.

    python benchmarks/two_devices.py [--rounds 3] [--batches 3] [--tokens 128] [--samples 8]

All train the same GPT on the same batch with AdamW, each with the number of microbatches at which it is fastest, and
run each block again in the backward where nothing else is said. The ceiling is two threads that compute half of the
microbatches each and know nothing of each other. Losses are compared, too: speeds of different numbers mean nothing.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from itertools import zip_longest

from common import Row, show
from peers import CEILING, KEEPING, ONE_THREAD, OURS, PEERS, Contestant, Entry, Setting

TARGET = 0.95
"""Share of the ceiling's speed that is aimed at."""


class Race:
    """Contestants that are warm, each at its best number of microbatches."""

    def __init__(self, entries: Mapping[str, Entry], setting: Setting, batches: int) -> None:
        self.batches = batches
        self.contestants: dict[str, Contestant] = {}
        self.microbatches: dict[str, int] = {}
        self.losses: dict[str, list[float]] = {}
        """Those of the second and later batches."""
        for name, entry in entries.items():
            best = None
            for microbatches in entry.microbatches:
                contestant = Contestant(entry, setting, microbatches)
                lap = contestant.lap(batches)
                case = f"{name}, {microbatches} microbatches"
                print(f"{case}: {lap.seconds:.2f} s per batch", file=sys.stderr)
                self.losses[case] = lap.losses
                if best is not None and best <= lap.seconds:
                    contestant.close()
                    continue
                if best is not None:
                    self.contestants[name].close()
                best = lap.seconds
                self.contestants[name], self.microbatches[name] = contestant, microbatches

    def rounds(self, count: int) -> list[dict[str, float]]:
        """Seconds per batch of each, round by round. They run in turn, so a neighbour on the machine slows all."""
        return [
            {name: contestant.lap(self.batches).seconds for name, contestant in self.contestants.items()}
            for _ in range(count)
        ]

    def close(self) -> None:
        for contestant in self.contestants.values():
            contestant.close()


def largest_difference(losses: Mapping[str, list[float]]) -> float:
    """Between any two with the same version of the parameters. With staleness 1 it is in use one batch later, and only
    the first step is that of the others.
    """
    aligned = [each[1:2] if name.startswith("staleness 1") else each for name, each in losses.items()]
    versions = [[loss for loss in each if loss is not None] for each in zip_longest(*aligned)]
    return max(max(each) - min(each) for each in versions)


def measure(
    rounds: int = 3, batches: int = 3, tokens: int = Setting.tokens, samples: int = Setting.samples
) -> list[Row]:
    entries = {**OURS, "the ceiling": CEILING, "one thread": ONE_THREAD, **PEERS, **KEEPING}
    race = Race(entries, Setting(tokens=tokens, samples=samples), batches)
    seconds = race.rounds(rounds)
    race.close()

    def speed(name: str) -> str:
        median = statistics.median(each[name] for each in seconds)
        return f"{name}: {samples * tokens / median:.0f} tokens/s with {race.microbatches[name]} microbatches"

    def compare(first: str, second: str, target: float | None = None) -> Row:
        ratio = statistics.median(each[second] / each[first] for each in seconds)
        return Row(f"{first}, by {second}'s", ratio, target=target, peer=speed(second))

    rows = [
        Row("largest difference between losses", largest_difference(race.losses), target=1e-3, at_most=True),
        compare("the ceiling", "one thread"),
    ]
    for own in OURS:
        rows.append(compare(own, "the ceiling", TARGET))
        rows[-1].peer += f"; {speed(own)}"
        rows.extend(compare(own, peer, 1.0) for peer in PEERS)
        rows.extend(compare(own, peer) for peer in KEEPING)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=Setting.tokens)
    parser.add_argument("--samples", type=int, default=Setting.samples)
    options = parser.parse_args()
    rows = measure(options.rounds, options.batches, options.tokens, options.samples)
    show("Two devices' worth: speeds", rows, "two_devices.json")


if __name__ == "__main__":
    main()
