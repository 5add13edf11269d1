"""Imports models made elsewhere, and exports nagjax's models for other libraries, as folders of safetensors."""
