"""The commands behind `nagjax`, one function each; their options are generated from the signatures."""
