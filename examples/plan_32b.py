"""Asks whether Qwen3-32B can be trained on eight GPUs of 24 GB, into which stages it is cut, and how long a step takes.

    python examples/plan_32b.py
    python examples/plan_32b.py --devices 1 --microbatches 8 --gpu "RTX 5090"     # options of `plan` go on

No GPU is needed, and nothing is allocated: the model runs with tensors that have no memory. Times are estimates from
data sheets, not measurements. Up to a minute; docs/pictures/plan_qwen3_32b.txt has all that it prints, such as:

    model_configs:qwen3_32b: 32.76 billion parameters, 32.76 of them trained, 68 layer calls; 8 devices, 16 microbatches
    roundpipe: fits
      device 21.3 of 21.6 GB
"""

import sys

from lightning_roundpipe.cli import main

HOST_MEMORY = 1024  # in GB

if __name__ == "__main__":
    command = f"plan --model model_configs:qwen3_32b --batch model_configs:tokens --host-memory {HOST_MEMORY}"
    sys.exit(main([*command.split(), *sys.argv[1:]]))
