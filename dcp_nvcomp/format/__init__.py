"""What is on disk: data files, and `.metadata`. docs/format.md describes it field by field."""
