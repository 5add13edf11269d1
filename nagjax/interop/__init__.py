"""Models made elsewhere, and nagjax's for elsewhere: safetensors folders in and out."""
