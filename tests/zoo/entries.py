"""All entries, by family."""

from zoo import decoders, encoder_decoders, encoders, handwritten, multimodal, vision
from zoo.entry import Entry

FAMILIES: dict[str, list[Entry]] = {
    "decoder": decoders.ENTRIES,
    "encoder": encoders.ENTRIES,
    "encoder-decoder": encoder_decoders.ENTRIES,
    "vision": vision.ENTRIES,
    "audio, multimodal, time series": multimodal.ENTRIES,
    "hand-written": handwritten.ENTRIES,
}

ZOO: dict[str, tuple[str, Entry]] = {
    entry.name: (family, entry) for family, entries in FAMILIES.items() for entry in entries
}
assert len(ZOO) == sum(map(len, FAMILIES.values())), "names must differ"
