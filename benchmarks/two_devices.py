"""Two devices' worth: two virtual devices of one thread each, against the ceiling and against others on two cores.

    python benchmarks/two_devices.py [--rounds 3] [--batches 5] [--tokens 128] [--samples 8]

All train the same GPT on the same batch with AdamW, each with the number of microbatches at which it is fastest, and
run each block again in the backward where nothing else is said. The ceiling is two threads that compute half of the
microbatches each and know nothing of each other. Losses are compared, too: speeds of different numbers mean nothing.
"""

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest

from common import Row, alternate, show
from peers import CEILING, KEEPING, ONE_THREAD, OURS, PEERS, Contestant, Entry, Lap, Setting

TARGET = 0.95
"""Share of the ceiling's speed that is aimed at."""


class Race:
    """Contestants that are warm, each at its best number of microbatches."""

    def __init__(self, entries: Mapping[str, Entry], setting: Setting) -> None:
        self.contestants: dict[str, Contestant] = {}
        self.microbatches: dict[str, str] = {}
        self.losses: dict[str, list[float]] = {}
        """Those of the second and later batches, with each number of microbatches."""
        for name, entry in entries.items():
            tried = {f"{count} microbatches": Contestant(entry, setting, count) for count in entry.microbatches}
            for count, contestant in tried.items():
                self.losses[f"{name}, {count}"] = contestant.lap(entry.warm_up).losses
            seconds = alternate({count: partial(_seconds, contestant) for count, contestant in tried.items()}, rounds=2)
            print(f"{name}: " + ", ".join(f"{each:.2f} s with {count}" for count, each in seconds.items()))
            best = min(seconds, key=lambda count: seconds[count])
            self.contestants[name], self.microbatches[name] = tried.pop(best), best
            for contestant in tried.values():
                contestant.close()

    def rounds(self, count: int, batches: int) -> list[dict[str, Lap]]:
        """They run in turn, so a neighbour on the machine slows all."""
        return [{name: contestant.lap(batches) for name, contestant in self.contestants.items()} for _ in range(count)]

    def close(self) -> None:
        for contestant in self.contestants.values():
            contestant.close()


def _seconds(contestant: Contestant) -> float:
    return contestant.lap(1).seconds


def largest_difference(losses: Mapping[str, list[float]]) -> float:
    """Between any two with the same version of the parameters. With staleness 1 it is in use one batch later, and only
    the first step is that of the others.
    """
    aligned = [each[1:2] if name.startswith("staleness 1") else each for name, each in losses.items()]
    versions = [[loss for loss in each if loss is not None] for each in zip_longest(*aligned)]
    return max(max(each) - min(each) for each in versions)


def measure(
    rounds: int = 3, batches: int = 5, tokens: int = Setting.tokens, samples: int = Setting.samples
) -> list[Row]:
    entries = {**OURS, "the ceiling": CEILING, "one thread": ONE_THREAD, **PEERS, **KEEPING}
    race = Race(entries, Setting(tokens=tokens, samples=samples))
    laps = race.rounds(rounds, batches)
    race.close()

    rows = [Row("largest difference between losses", largest_difference(race.losses), target=1e-3, at_most=True)]
    for name, microbatches in race.microbatches.items():
        median = statistics.median(each[name].seconds for each in laps)
        peer = ", ".join(filter(None, [microbatches, laps[-1][name].remark]))
        rows.append(Row(name, samples * tokens / median / 1000, "k tokens/s", peer=peer))

    def compare(first: str, second: str, target: float | None = None) -> None:
        ratio = statistics.median(each[second].seconds / each[first].seconds for each in laps)
        rows.append(Row(f"{first} by {second}", ratio, target=target))

    compare("the ceiling", "one thread")
    for own in OURS:
        compare(own, "the ceiling", TARGET)
        for peer in PEERS:
            compare(own, peer, 1.0)
        for peer in KEEPING:
            compare(own, peer)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=Setting.tokens)
    parser.add_argument("--samples", type=int, default=Setting.samples)
    options = parser.parse_args()
    rows = measure(options.rounds, options.batches, options.tokens, options.samples)
    show("Two devices' worth", rows, "two_devices.json")


if __name__ == "__main__":
    main()
