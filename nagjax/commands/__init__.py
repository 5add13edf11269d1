"""The verbs of `nagjax`, one file each: a new file here is a new verb, nothing else to edit (see `nagjax.cli`)."""
