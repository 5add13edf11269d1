"""The one owner of a run's folder: every file name in it, its config, its log, and how it is opened."""
