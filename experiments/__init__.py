"""Claims put to the test, one file each. `python -m experiments` lists them."""
