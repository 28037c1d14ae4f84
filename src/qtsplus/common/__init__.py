"""What several rooms share and no user imports: files, journals, validation."""
