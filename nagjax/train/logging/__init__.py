"""Output of a run while it trains: metrics and the progress line."""
