"""In what the shipped recipe's run differs from that of a 3B: its second stage, in which only the budget learns."""

from pathlib import Path

from .work import HALVES

RECIPE = Path(__file__).resolve().parents[2] / "recipes/qtsplus-3b.yaml"
SETTINGS = (
    "model.variant=null",
    f"model.dtype={'bfloat16' if HALVES else 'float32'}",
    "model.selector.reencode_layers=0",
    "model.selector.target_n=12",
    "model.selector.rho_max=0.2",
    "data.processor_kwargs={fps: 2}",
    "training.relevance_heads=[[0, 0]]",  # labels teach the scores in place of the first stage
    "training.gradient_checkpointing=false",
    "training.gradient_accumulation_steps=4",
    "training.retention_share=0",
    "training.learning_rate=1.0e-3",
    "training.max_steps=75",
    f"training.bf16={HALVES}",
    "training.dataloader_num_workers=0",
    "training.use_cpu=true",
    "training.save_steps=25",
)
