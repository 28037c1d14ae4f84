"""The paper's sets, made with teachers: single-choice questions from captions, screened and answered by sight."""
