"""Training of QTSplus models with the Trainer of Transformers."""

from ..data.formats import read_records as read_records
from ..data.records import VideoRecord as VideoRecord
from .arguments import QTSplusTrainingArguments as QTSplusTrainingArguments
from .dataset import VideoQACollator as VideoQACollator
from .dataset import VideoQADataset as VideoQADataset
from .trainer import QTSplusTrainer as QTSplusTrainer
