"""Safety of a run: the guard against bad steps, stopping by a signal, and the watchdog."""
