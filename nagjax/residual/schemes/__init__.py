"""One file per residual scheme: a new file in this folder is found by name, nothing else to edit."""
