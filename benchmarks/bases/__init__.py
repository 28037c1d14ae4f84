"""What the laboratory's worlds taught, beside the model that is bundled."""

from pathlib import Path

REAL = Path(__file__).with_name("real")  # tower and LoRA that read footage with SmolLM2-135M, see benchmarks/real
