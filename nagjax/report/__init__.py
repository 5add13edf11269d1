"""Reports on runs: reading, comparing, diagnosing and drawing run folders."""
