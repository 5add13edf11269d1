"""nagjax: train and understand very deep Transformers, with the residual stream as the subject."""

__version__ = "0.1.0"
