"""Checkpoints: the store, the manifest that says what is whole, and which of them stay."""
