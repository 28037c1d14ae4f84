"""Speed and memory against stock Qwen2.5-VL: every figure is a ratio within one run, with all its repeats on disk."""
