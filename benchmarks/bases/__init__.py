"""The tiny models that the laboratory's worlds taught, beside the one that is bundled."""

from pathlib import Path

CROWD = Path(__file__).with_name("crowd")  # learned the crowded TinyWorld: what its pages of results are about
