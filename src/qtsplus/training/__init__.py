"""Training of QTSplus models with the Trainer of Transformers."""

from ..hub.initialise import initialise_selector
from .arguments import QTSplusTrainingArguments
from .collator import VideoQACollator
from .dataset import VideoQADataset, VideoRecord, read_records
from .schedules import Schedule
from .trainer import QTSplusTrainer

__all__ = [
    "QTSplusTrainer",
    "QTSplusTrainingArguments",
    "Schedule",
    "VideoQACollator",
    "VideoQADataset",
    "VideoRecord",
    "initialise_selector",
    "read_records",
]
