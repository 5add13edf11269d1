"""Checkpoints: the store, the manifest that proves that a checkpoint is complete, and the retention policy."""
