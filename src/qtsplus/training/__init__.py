"""Training of QTSplus models with the Trainer of Transformers."""

from ..data.formats import read_records
from ..data.records import VideoRecord
from .arguments import QTSplusTrainingArguments
from .collator import VideoQACollator
from .dataset import VideoQADataset
from .trainer import QTSplusTrainer

__all__ = [
    "QTSplusTrainer",
    "QTSplusTrainingArguments",
    "VideoQACollator",
    "VideoQADataset",
    "VideoRecord",
    "read_records",
]
