"""A run's folder. Only this package knows the file names in it, its config, its log, and how it is opened."""
