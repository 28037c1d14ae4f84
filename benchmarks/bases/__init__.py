"""The tiny models that the laboratory's worlds taught, beside the one that is bundled."""

from pathlib import Path

CROWD = Path(__file__).with_name("crowd")  # learned the crowded TinyWorld: what its pages of results are about
REAL = Path(__file__).with_name("real")  # tower and LoRA that read footage with SmolLM2-135M, see benchmarks/real
