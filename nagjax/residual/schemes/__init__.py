"""One file per residual scheme: a new file in this folder is found by its name, with nothing else to edit."""
