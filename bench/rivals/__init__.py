"""What jspec is measured against, a file an operation: PyTorch and FlashInfer."""
