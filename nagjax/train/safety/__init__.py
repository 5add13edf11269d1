"""What keeps a run from harm: the guard against bad steps, the end by a signal, the watchdog."""
