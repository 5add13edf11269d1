"""What a run tells while it trains: metrics, the progress line."""
