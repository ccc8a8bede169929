"""The decoder, its families, checkpoints and the bundled model."""
